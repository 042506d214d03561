-- What all scripts share. Key names and constants stand above this file; storyteller/wire.py puts them there.

local function clock()  -- microseconds, this server's own
    local time = redis.call('TIME')
    return time[1] * 1000000 + time[2]
end

local function ms(micros)
    return math.floor(micros / 1000)
end

-- After a loss of all data nothing is there: every script that needs the group makes it anew, from the beginning.
local function ensure_group()
    if redis.call('EXISTS', ASKS) == 0 then
        redis.call('XGROUP', 'CREATE', ASKS, GROUP, '0', 'MKSTREAM')
    end
end

-- Opens the next attempt at a story: from here on no entry of an earlier attempt is accepted by its stream.
local function next_attempt(story, mark)
    local attempt = redis.call('HINCRBY', STORY .. story, 'attempt', 1)
    redis.call('XADD', TOLD .. story, attempt .. '-0', 'mark', mark)
    return attempt
end

-- Takes a story out of the hands of whoever writes it, to the place in the queue that it had.
local function put_back(story, entry)
    next_attempt(story, 'waiting')
    redis.call('HSET', STORY .. story, 'put_back', ms(clock()))
    redis.call('XACK', ASKS, GROUP, entry)
    redis.call('ZADD', WAITING, redis.call('HGET', STORY .. story, 'turn'), story)
end

-- The story of an entry in somebody's pending list; nil, and the entry is gone, where there is none any more.
local function story_of(entry)
    local found = redis.call('XRANGE', ASKS, entry, entry)[1]
    if found and redis.call('HEXISTS', STORY .. found[2][2], 'entry') == 1 then
        return found[2][2], found[2][4]
    end
    redis.call('XACK', ASKS, GROUP, entry)
    redis.call('XDEL', ASKS, entry)
end

-- Whether silence means anything. Not for half a lease after nobody at all spoke for so long: then it was Redis that
-- was away, and whoever is alive must first get the chance to say so.
local function is_settled(now)
    local last, since = unpack(redis.call('HMGET', PULSE, 'last', 'since'))
    if not last or now - last > LEASE_MS / 2 then
        since = now
    end
    redis.call('HSET', PULSE, 'last', now, 'since', since)
    return now - since >= LEASE_MS / 2
end

-- The one ending of a story. `fields` are those that only its storyteller knows; the times come from here.
local function finish(story, id, reason, fields)
    local key, told, now = STORY .. story, TOLD .. story, ms(clock())
    local facts = redis.call('HMGET', key, 'entry', 'player', 'accepted', 'begun', 'first', 'seed')
    local accepted = tonumber(facts[3])
    local function since(time)
        return time and math.max(0, tonumber(time) - accepted) or 0
    end
    redis.call('XADD', told, id, 'end', reason, 'seed', facts[6], 'queue_ms', since(facts[4] or now),
        'first_text_ms', since(facts[5]), 'total_ms', since(now), unpack(fields))
    redis.call('XACK', ASKS, GROUP, facts[1])
    redis.call('XDEL', ASKS, facts[1])
    redis.call('ZREM', WAITING, story)
    if facts[2] ~= '' then
        redis.call('SREM', PLAYER .. facts[2], story)
    end
    redis.call('HSET', key, 'ended', now)
    redis.call('PEXPIRE', key, RETENTION_MS)
    redis.call('PEXPIRE', told, RETENTION_MS)
end

-- Ends a story that nobody writes: with what its earlier attempts told.
local function finish_unwritten(story, reason, message)
    local tokens = 0
    for _, entry in ipairs(redis.call('XREVRANGE', TOLD .. story, '+', '-', 'COUNT', 100)) do
        local field = entry[2]
        for i = 1, #field, 2 do
            if field[i] == 'count' then
                tokens = math.max(tokens, tonumber(field[i + 1]))
            end
        end
    end
    local prompt = redis.call('HGET', STORY .. story, 'prompt_tokens') or 0
    local attempt = redis.call('HINCRBY', STORY .. story, 'attempt', 1)
    finish(story, attempt .. '-0', reason,
        {'prompt_tokens', prompt, 'completion_tokens', tokens, 'message', message})
end
