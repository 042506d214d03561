-- ARGV, for each telling: story, attempt, sequence number, reason of the ending or '', prompt tokens, n, n fields
-- Appends text and endings. A repeated telling changes nothing; one of an attempt that is over is refused, and so is one
-- that does not follow on the last (Redis came back without its last second): a story never has a hole.
-- Returns for each: 'told' | 'refused' | 'gone' (no such story any more)
local answers, i, now = {}, 1, ms(clock())
while i <= #ARGV do
    local story, attempt, seq, reason, prompt, n = unpack(ARGV, i, i + 5)
    n = tonumber(n)
    local fields = {unpack(ARGV, i + 6, i + 5 + n)}
    i = i + 6 + n
    local told = TOLD .. story
    local top = redis.call('XREVRANGE', told, '+', '-', 'COUNT', 1)[1]
    local answer = 'told'
    if not top then
        answer = 'gone'
    else
        local top_attempt, top_seq = top[1]:match('(%d+)-(%d+)')
        if tonumber(top_attempt) ~= tonumber(attempt) or tonumber(top_seq) + 1 < tonumber(seq) then
            answer = 'refused'
        elseif tonumber(top_seq) < tonumber(seq) then
            local id = attempt .. '-' .. seq
            if reason == '' then
                redis.call('XADD', told, id, unpack(fields))
                if redis.call('HSETNX', STORY .. story, 'first', now) == 1 then
                    redis.call('HSET', STORY .. story, 'prompt_tokens', prompt)
                end
            else
                finish(story, id, reason, fields)
            end
        end
    end
    answers[#answers + 1] = answer
end
return answers
