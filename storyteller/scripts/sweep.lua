-- ARGV: deadline in ms
-- Puts the stories of dead storytellers back into the queue, ends what waited too long or is heard by nobody.
-- Returns {put back, dead letters, expired, cancelled, failed, waiting, age of the oldest waiting in ms}
ensure_group()
local deadline, now = tonumber(ARGV[1]), ms(clock())
local settled = is_settled(now)

-- Stories by the storyteller that was silent for too long.
local orphans = {}
local silent = settled and redis.call('XPENDING', ASKS, GROUP, 'IDLE', LEASE_MS, '-', '+', 10000) or {}
for _, pending in ipairs(silent) do
    local entry, teller = pending[1], pending[2]
    local story, ask = story_of(entry)
    if story then
        orphans[teller] = orphans[teller] or {}
        table.insert(orphans[teller], {story, entry, ask, tonumber(redis.call('HGET', STORY .. story, 'crashes'))})
    end
end

-- Who is to blame for a death? At first everyone aboard. A story that was aboard twice is written with no other such
-- story beside it (take.lua); when it is aboard at a third death, that death is its alone.
local put_back_count, dead = 0, 0
for _, aboard in pairs(orphans) do
    local worst = 0
    for _, orphan in ipairs(aboard) do
        worst = math.max(worst, orphan[4])
    end
    for _, orphan in ipairs(aboard) do
        local story, entry, ask, crashes = unpack(orphan)
        if worst < MAX_CRASHES - 1 or crashes == worst then
            crashes = redis.call('HINCRBY', STORY .. story, 'crashes', 1)
        end
        if crashes >= MAX_CRASHES then
            dead = dead + 1
            redis.call('XADD', DEAD, 'MAXLEN', '~', 1000, '*', 'story', story, 'ask', ask)
            finish_unwritten(story, 'failed', 'its storyteller died ' .. crashes .. ' times while writing it')
        else
            put_back_count = put_back_count + 1
            put_back(story, entry)
        end
    end
end

local expired, cancelled, failed, oldest = 0, 0, 0, 0
local nobody_lives = settled and redis.call('ZCOUNT', LIVE, now - PRESENCE_MS, '+inf') == 0
for _, story in ipairs(redis.call('ZRANGE', WAITING, 0, -1)) do
    local facts = redis.call('HMGET', STORY .. story, 'attempt', 'accepted', 'heard', 'cancelled', 'put_back')
    if not facts[1] then
        redis.call('ZREM', WAITING, story)
    elseif facts[1] == '0' and now - facts[2] > deadline then
        finish_unwritten(story, 'expired', 'no storyteller began it in time')
        expired = expired + 1
    elseif facts[4] or (settled and tonumber(facts[3]) < now) then
        finish_unwritten(story, 'cancelled', facts[4] and '' or 'nobody listens any more')
        cancelled = cancelled + 1
    elseif nobody_lives and facts[5] and now - facts[5] > deadline then
        finish_unwritten(story, 'failed', 'no storyteller went on with it in time')
        failed = failed + 1
    else
        oldest = math.max(oldest, now - facts[2])
    end
end

-- Names of storytellers that are long gone.
for _, teller in ipairs(redis.call('ZRANGEBYSCORE', LIVE, '-inf', now - 60000)) do
    if #redis.call('XPENDING', ASKS, GROUP, '-', '+', 1, teller) == 0 then
        redis.call('XGROUP', 'DELCONSUMER', ASKS, GROUP, teller)
        redis.call('ZREM', LIVE, teller)
        redis.call('HDEL', HOUSES, teller)
    end
end
return {put_back_count, dead, expired, cancelled, failed, redis.call('ZCARD', WAITING), oldest}
