-- ARGV: story
-- Ends a story that waits at once; asks its storyteller to end one that is being written.
-- Returns 'cancelled' | 'asked' | 'ended' (already) | 'gone'
local story, key = ARGV[1], STORY .. ARGV[1]
local facts = redis.call('HMGET', key, 'entry', 'ended')
if not facts[1] then
    return 'gone'
elseif facts[2] then
    return 'ended'
elseif redis.call('ZSCORE', WAITING, story) then
    finish_unwritten(story, 'cancelled', '')
    return 'cancelled'
end
-- The mark outlives the message: a storyteller that goes on with this story sees it.
redis.call('HSET', key, 'cancelled', '1')
redis.call('XADD', CANCELS, 'MAXLEN', '~', 10000, '*', 'story', story)
return 'asked'
