-- Part of burst_buffer.lua for slurmscriptd: each call exchanges one request and reply with the bridge through two FIFOs.

local RUN = ...

local SCRIPT_BYTES_MAX = 256 * 1024 -- also Forebay's limit
local ANSWER_BYTES_MAX = 64 * 1024 -- longest reply: the status of a job
local SLOTS = 64 -- FIFOs that the bridge keeps ready for replies: slots/1 to slots/64
local REQUEST_BYTES_MAX = 4096 -- longest request: the size of an atomic write to a pipe
local AWAY_WAIT_S = 3 -- interval between two requests while no bridge replies

local function read_all(file)
  local parts, size = {}, 0
  while size < ANSWER_BYTES_MAX do
    local part = file:read(4096)
    if not part then break end
    parts[#parts + 1], size = part, size + #part
  end
  return table.concat(parts)
end

-- Claim a FIFO for the reply by renaming it, which succeeds for only one caller (Lua cannot create FIFOs). The new name
-- identifies the call. Return the new name, or nil if no FIFO is left or no bridge runs.
local function claim(call)
  local from = #call * 7 + (tonumber(call:match("%d+")) or 0)
  for tried = 1, SLOTS do
    local slot = (from + tried) % SLOTS + 1
    local name = slot .. "." .. call
    if os.rename(RUN .. "/slots/" .. slot, RUN .. "/calls/" .. name) then return name end
  end
end

local function write_file(path, text, mode)
  local file = io.open(path, mode)
  if not file then return false end
  file:setvbuf("full", REQUEST_BYTES_MAX + 1) -- write atomically, because other callers write to the same FIFO
  local written = file:write(text)
  return file:close() and written
end

-- Return the bridge's reply, or an empty string if no bridge runs or the bridge has ended. The FIFO for requests is
-- opened in mode r+, which never blocks and never creates a file.
local function exchange(name, words, script)
  local taken = claim(name .. "." .. (words[1] and words[1]:match("^%d+$") or "-"))
  if not taken then return "" end
  local line = taken .. "\0" .. name
  for _, word in ipairs(words) do line = line .. "\0" .. word end
  if #line >= REQUEST_BYTES_MAX or line:find("\n", 1, true) then
    return "fail\nthe call has more than " .. REQUEST_BYTES_MAX .. " bytes, or a line break"
  end
  if script and not write_file(RUN .. "/calls/" .. taken .. ".script", script, "w") then return "" end
  if not write_file(RUN .. "/requests", line .. "\n", "r+") then return "" end
  local reply = io.open(RUN .. "/calls/" .. taken, "r")
  if not reply then return "" end
  local answer = read_all(reply)
  reply:close()
  return answer
end

-- Send a request to the bridge; return Slurm's code and a text. A reply is a word (`ok`, `fail` or `busy`), a line break
-- and a text. The request is repeated after an incomplete reply, because the bridge or its caller was ended. Only `ok`
-- counts as success, because Slurm treats a timeout as success.
local function ask(name, words, script)
  for index, word in ipairs(words) do words[index] = tostring(word) end
  while true do
    local word, text = exchange(name, words, script):match("^(%l+)\n(.*)$")
    if word == "ok" then
      if text ~= "" then return slurm.SUCCESS, text end
      return slurm.SUCCESS
    end
    if word == "busy" then return slurm.SUCCESS, slurm.SLURM_BB_BUSY end
    if word == "fail" then return slurm.ERROR, text end
    local slept = os.execute("sleep " .. AWAY_WAIT_S)
    if slept ~= 0 and slept ~= true then return slurm.ERROR, name .. " was ended while no bridge answered" end
  end
end

local calls = {}

-- Open a job's script. From 24.11 on, Slurm creates no files for a task that it splits from a job array; the script is
-- then in the directory of the array.
local function open_script(path, info)
  local file = io.open(path, "rb")
  local array = not file and type(info) == "table" and tonumber(info.array_job_id)
  local state = array and path:match("^(/.*)/hash%.%d/job%.%d+/script$")
  if not state then return file end
  return io.open(string.format("%s/hash.%d/job.%d/script", state, array % 10, array), "rb")
end

function calls.setup(job, uid, gid, pool, size, script, info)
  local file = open_script(script, info)
  local text = file and file:read(SCRIPT_BYTES_MAX + 2) or ""
  if file then file:close() end
  if not file or #text > SCRIPT_BYTES_MAX + 1 then return slurm.ERROR, "the job's script cannot be read, or is too long" end
  return ask("setup", { job, uid, gid, pool, size }, text)
end

-- Slurm polls from 24.05 on, and defines this value from then on. The number of arguments does not show whether Slurm
-- polls, because uid, gid and the job's table were added in 23.02.
local polls = slurm.SLURM_BB_BUSY ~= nil

function calls.data_in(job) return ask(polls and "begin_data_in" or "data_in", { job }) end

function calls.test_data_in(job) return ask("test_data_in", { job }) end

function calls.pre_run(job) return ask("pre_run", { job }) end

function calls.post_run(job) return ask("post_run", { job }) end

function calls.data_out(job) return ask(polls and "begin_data_out" or "data_out", { job }) end

function calls.test_data_out(job) return ask("test_data_out", { job }) end

function calls.job_teardown(job, script, hurry) return ask("teardown", { job, hurry }) end

function calls.get_status(...) return ask("get_status", { ... }) end

return calls
