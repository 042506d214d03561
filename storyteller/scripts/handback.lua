-- ARGV: storyteller, then story and attempt of each story that it gives back
-- A storyteller that leaves gives its stories back, first in the queue; another goes on from what was told.
for i = 2, #ARGV, 2 do
    local facts = redis.call('HMGET', STORY .. ARGV[i], 'entry', 'attempt', 'ended')
    if facts[1] and not facts[3] and facts[2] == ARGV[i + 1] then
        put_back(ARGV[i], facts[1])
    end
end
redis.call('ZREM', LIVE, ARGV[1])
redis.call('HDEL', HOUSES, ARGV[1])
if redis.call('EXISTS', ASKS) == 1 and #redis.call('XPENDING', ASKS, GROUP, '-', '+', 1, ARGV[1]) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', ASKS, GROUP, ARGV[1])
end
return 'ok'
