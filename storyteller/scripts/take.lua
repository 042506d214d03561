-- ARGV: storyteller, how many, deadline in ms
-- Moves the first stories of the queue into this storyteller's hands and opens an attempt at each.
-- Returns {{story, ask, attempt, '1' where cancelled, crashes, ms waited, {told entry, ...}}, ...}, number that expired instead
local teller, wanted, deadline = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
ensure_group()
local taken, expired = {}, 0
while #taken < wanted do
    local story = redis.call('ZRANGE', WAITING, 0, 0)[1]
    if not story then
        break
    end
    redis.call('ZREM', WAITING, story)
    local facts = redis.call('HMGET', STORY .. story, 'entry', 'attempt', 'accepted', 'cancelled', 'crashes')
    local now = ms(clock())
    if facts[1] and facts[2] == '0' and now - facts[3] > deadline then
        finish_unwritten(story, 'expired', 'no storyteller began it in time')
        expired = expired + 1
    elseif facts[1] then
        -- An ask that nobody has begun is in no pending list yet: FORCE puts it into this storyteller's.
        local claimed = redis.call('XCLAIM', ASKS, GROUP, teller, 0, facts[1], 'FORCE')[1]
        if claimed then
            local told = redis.call('XRANGE', TOLD .. story, '-', '+')
            local attempt = next_attempt(story, 'begun')
            redis.call('HSETNX', STORY .. story, 'begun', now)
            taken[#taken + 1] = {story, claimed[2][4], attempt, facts[4] or '0', facts[5], now - facts[3], told}
        else
            finish_unwritten(story, 'failed', 'the ask was lost')
        end
    end
end
return {taken, expired}
