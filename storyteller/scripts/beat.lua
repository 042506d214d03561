-- ARGV: storyteller, its house, ms since its last progress, then story and attempt of each story in its hands
-- Renews this storyteller's hold of its stories and says it is alive.
-- Returns for each story: 'held' | 'lost' | 'cancelled' | 'unheard' (its last listener left too long ago)
local teller, house, age = ARGV[1], ARGV[2], tonumber(ARGV[3])
ensure_group()
local now, answers = ms(clock()), {}
local settled = is_settled(now)
redis.call('ZADD', LIVE, now - age, teller)
redis.call('HSET', HOUSES, teller, house)
for i = 4, #ARGV, 2 do
    local facts = redis.call('HMGET', STORY .. ARGV[i], 'entry', 'attempt', 'cancelled', 'heard', 'ended')
    local answer = 'held'
    if not facts[1] or facts[5] or facts[2] ~= ARGV[i + 1] then
        answer = 'lost'
    else
        -- Only the holder of the open attempt gets here: a sleeper that wakes late cannot take its story back.
        redis.call('XCLAIM', ASKS, GROUP, teller, 0, facts[1], 'JUSTID')
        if facts[3] then
            answer = 'cancelled'
        elseif settled and tonumber(facts[4]) < now then
            answer = 'unheard'
        end
    end
    answers[#answers + 1] = answer
end
return answers
