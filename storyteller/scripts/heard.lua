-- ARGV: ms for which these stories count as heard, then stories
-- Keeps stories alive that somebody at this gateway listens to.
-- Returns for each: asks before it in the queue | -1 (no longer waiting) | -2 (gone: all data was lost)
local until_ms, places = ms(clock()) + tonumber(ARGV[1]), {}
for i = 2, #ARGV do
    local key = STORY .. ARGV[i]
    local facts = redis.call('HMGET', key, 'entry', 'ended', 'heard')
    if not facts[1] then
        places[#places + 1] = -2
    else
        if not facts[2] and tonumber(facts[3]) < until_ms then
            redis.call('HSET', key, 'heard', until_ms)
        end
        places[#places + 1] = redis.call('ZRANK', WAITING, ARGV[i]) or -1
    end
end
return places
