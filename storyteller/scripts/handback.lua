-- ARGV: storyteller
-- A storyteller that leaves gives back all that is in its hands, first in the queue; another goes on from what was told.
local teller = ARGV[1]
ensure_group()
for _, pending in ipairs(redis.call('XPENDING', ASKS, GROUP, '-', '+', 10000, teller)) do
    local story = story_of(pending[1])
    if story then
        put_back(story, pending[1])
    end
end
redis.call('ZREM', LIVE, teller)
redis.call('HDEL', HOUSES, teller)
if #redis.call('XPENDING', ASKS, GROUP, '-', '+', 1, teller) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', ASKS, GROUP, teller)
end
return 'ok'
