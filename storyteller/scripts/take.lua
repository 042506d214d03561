-- ARGV: storyteller, how many, deadline in ms, then the stories that it holds
-- Moves the first stories of the queue into this storyteller's hands and opens an attempt at each. Safe to repeat: what
-- is in its hands without its knowing (an answer was lost on the way) is given again, as another attempt.
-- Returns {{story, ask, attempt, '1' where cancelled, crashes, ms waited, {told entry, ...}}, ...}, number that expired instead
local teller, wanted, deadline = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
ensure_group()
local taken, expired, now = {}, 0, ms(clock())

local function facts_of(story)
    return redis.call('HMGET', STORY .. story, 'entry', 'attempt', 'accepted', 'cancelled', 'crashes')
end

-- Two stories that were aboard two deaths are never in the same hands: nobody could tell which of them killed.
local function is_suspect(facts)
    return tonumber(facts[5] or 0) >= MAX_CRASHES - 1
end

local function give(story, facts)
    local told = redis.call('XRANGE', TOLD .. story, '-', '+')
    local attempt = next_attempt(story, 'begun')
    -- An ask that nobody has begun is in no pending list yet: FORCE puts it into this storyteller's.
    local claimed = redis.call('XCLAIM', ASKS, GROUP, teller, 0, facts[1], 'FORCE')[1]
    redis.call('ZREM', WAITING, story)
    if claimed then
        redis.call('HSETNX', STORY .. story, 'begun', now)
        taken[#taken + 1] = {story, claimed[2][4], attempt, facts[4] or '0', facts[5], now - facts[3], told}
    else
        finish_unwritten(story, 'failed', 'the ask was lost')
    end
end

local known, has_suspect = {}, false
for i = 4, #ARGV do
    local facts = facts_of(ARGV[i])
    if facts[1] then
        known[facts[1]] = true
        has_suspect = has_suspect or is_suspect(facts)
    end
end
for _, pending in ipairs(redis.call('XPENDING', ASKS, GROUP, '-', '+', 10000, teller)) do
    local found = not known[pending[1]] and redis.call('XRANGE', ASKS, pending[1], pending[1])[1]
    local facts = found and facts_of(found[2][2])
    if facts and facts[1] then
        has_suspect = has_suspect or is_suspect(facts)
        give(found[2][2], facts)
    end
end

local rank = 0
while #taken < wanted do
    local story = redis.call('ZRANGE', WAITING, rank, rank)[1]
    if not story then
        break
    end
    local facts = facts_of(story)
    if not facts[1] then
        redis.call('ZREM', WAITING, story)
    elseif facts[2] == '0' and now - facts[3] > deadline then
        finish_unwritten(story, 'expired', 'no storyteller began it in time')
        expired = expired + 1
    elseif has_suspect and is_suspect(facts) then
        rank = rank + 1
    else
        has_suspect = has_suspect or is_suspect(facts)
        give(story, facts)
    end
end
return {taken, expired}
