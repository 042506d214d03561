-- ARGV: story, ask, player or '', seed, micros ahead of its turn, queue limit, player's limit, gateway, grace in ms
-- Accepts an ask, or says why not, in one step. Asked again with the same story (a reply was lost), it says the same.
-- Returns {'accepted', asks before this one, n} | {'busy', waiting, n} | {'rate_limited', unfinished, n}; n are being written
local story, ask, player, seed, ahead, queue_limit, player_limit, gateway, grace = unpack(ARGV)
ensure_group()
local key, written = STORY .. story, redis.call('XPENDING', ASKS, GROUP)[1]
if redis.call('EXISTS', key) == 1 then
    return {'accepted', redis.call('ZRANK', WAITING, story) or 0, written}
end
local waiting = redis.call('ZCARD', WAITING)
local unfinished = player ~= '' and redis.call('SCARD', PLAYER .. player) or 0
if player ~= '' and unfinished >= tonumber(player_limit) then
    return {'rate_limited', unfinished, written}
end
if waiting >= tonumber(queue_limit) then
    return {'busy', waiting, written}
end
local now = clock()
-- A player's second story waits as if asked later, so that nobody waits behind two stories of the same player;
-- a high priority as if asked earlier. Both are time, so nothing starves.
local turn = string.format('%.0f', now + unfinished * TURN_US - tonumber(ahead))
local entry = redis.call('XADD', ASKS, '*', 'story', story, 'ask', ask)
redis.call('HSET', key, 'entry', entry, 'player', player, 'seed', seed, 'accepted', ms(now), 'turn', turn,
    'attempt', 0, 'crashes', 0, 'heard', ms(now) + tonumber(grace))
redis.call('ZADD', WAITING, turn, story)
if player ~= '' then
    redis.call('SADD', PLAYER .. player, story)
end
redis.call('XADD', WAKE .. gateway, 'MAXLEN', '~', 16, '*', 'story', story)
redis.call('EXPIRE', WAKE .. gateway, 3600)
return {'accepted', redis.call('ZRANK', WAITING, story), written}
