-- Forebay as the burst buffer of an unmodified Slurm (22.05 and newer; Lua 5.1 to 5.4).
--
-- `pools`, `paths` and `job_process` run inside slurmctld, under its locks: they open local files that
-- `forebay slurm bridge` keeps, and nothing else. No process, no socket, nothing that could wait.
-- The other functions run in slurmscriptd: one exchange with the bridge through two FIFOs. No process is started, and
-- nobody waits but Slurm's own.

-- This line is written by `forebay slurm install`.
local RUN = "/run/forebay-slurm"

local SCRIPT_BYTES_MAX = 256 * 1024 -- a longer script is refused by Forebay, too
local FILE_BYTES_MAX = 1024 * 1024 -- of site.json and pools.json: a thousand pools
local DEPTH_MAX = 16 -- nesting of site.json: it has five levels
local ANSWER_BYTES_MAX = 64 * 1024 -- of the bridge: status of a job
local SLOTS = 64 -- FIFOs that the bridge keeps ready for answers: the files slots/1 to slots/64
local REQUEST_BYTES_MAX = 4096 -- of one request: what a pipe takes in one piece
local AWAY_WAIT_S = 3 -- between two questions while no bridge answers

forebay = { SCRIPT_BYTES_MAX = SCRIPT_BYTES_MAX }

-- ---- files of the bridge

local function slurp(path, most)
  local file = io.open(path, "rb")
  if not file then return nil end
  local text = file:read(most + 1)
  file:close()
  if text == nil then return "" end
  if #text > most then return nil end
  return text
end

-- A strict, bounded reader of JSON; nil for anything that is none. null is left out of tables.
local ESCAPES = { ['"'] = '"', ["\\"] = "\\", ["/"] = "/", b = "\b", f = "\f", n = "\n", r = "\r", t = "\t" }

local function utf8_of(code)
  if code < 0x80 then return string.char(code) end
  if code < 0x800 then return string.char(0xC0 + math.floor(code / 64), 0x80 + code % 64) end
  return string.char(0xE0 + math.floor(code / 4096), 0x80 + math.floor(code / 64) % 64, 0x80 + code % 64)
end

function forebay.read_json(text)
  local at = 1
  local value
  local function blank() at = text:find("[^ \t\r\n]", at) or #text + 1 end
  local function fault() error("json", 0) end
  local function quoted()
    local parts = {}
    at = at + 1
    while true do
      local stop = text:find('[%c"\\]', at)
      if not stop then fault() end
      parts[#parts + 1] = text:sub(at, stop - 1)
      local found = text:sub(stop, stop)
      if found == '"' then
        at = stop + 1
        return table.concat(parts)
      elseif found ~= "\\" then
        fault()
      end
      local escape = text:sub(stop + 1, stop + 1)
      if escape == "u" then
        local digits = text:match("^%x%x%x%x", stop + 2)
        if not digits then fault() end
        parts[#parts + 1] = utf8_of(tonumber(digits, 16))
        at = stop + 6
      else
        if not ESCAPES[escape] then fault() end
        parts[#parts + 1] = ESCAPES[escape]
        at = stop + 2
      end
    end
  end
  local function listed(depth)
    local found = {}
    at = at + 1
    blank()
    if text:sub(at, at) == "]" then at = at + 1 return found end
    while true do
      found[#found + 1] = value(depth)
      blank()
      local after = text:sub(at, at)
      at = at + 1
      if after == "]" then return found end
      if after ~= "," then fault() end
    end
  end
  local function keyed(depth)
    local found = {}
    at = at + 1
    blank()
    if text:sub(at, at) == "}" then at = at + 1 return found end
    while true do
      blank()
      if text:sub(at, at) ~= '"' then fault() end
      local key = quoted()
      blank()
      if text:sub(at, at) ~= ":" then fault() end
      at = at + 1
      found[key] = value(depth)
      blank()
      local after = text:sub(at, at)
      at = at + 1
      if after == "}" then return found end
      if after ~= "," then fault() end
    end
  end
  value = function(depth)
    if depth > DEPTH_MAX then fault() end
    blank()
    local first = text:sub(at, at)
    if first == "{" then return keyed(depth + 1) end
    if first == "[" then return listed(depth + 1) end
    if first == '"' then return quoted() end
    for word, what in pairs({ ["true"] = true, ["false"] = false }) do
      if text:sub(at, at + #word - 1) == word then at = at + #word return what end
    end
    if text:sub(at, at + 3) == "null" then at = at + 4 return nil end
    local number = text:match("^-?%d+%.?%d*[eE]?[+-]?%d*", at)
    if not number or not tonumber(number) then fault() end
    at = at + #number
    return tonumber(number)
  end
  local whole, found = pcall(function()
    local all = value(1)
    blank()
    if at <= #text then fault() end
    return all
  end)
  if not whole or type(found) ~= "table" then return nil end
  return found
end

local function uptime_s()
  local text = slurp("/proc/uptime", 256)
  return text and tonumber(text:match("^%d+%.?%d*"))
end

-- Return a file of the bridge, and whether it may be believed now. Times are of the machine's uptime, which no clock
-- that is set moves; a file of an earlier boot would be from the future, and a tmpfs does not keep one.
local function news(name)
  local text = slurp(RUN .. "/" .. name, FILE_BYTES_MAX)
  local found = text and forebay.read_json(text)
  if not found then return nil, false end
  local now_s, until_s, lasts_s = uptime_s(), tonumber(found["until"]), tonumber(found.lasts)
  if not now_s or not until_s or not lasts_s then return found, false end
  return found, now_s <= until_s and until_s <= now_s + lasts_s
end

function forebay.integer(number) return string.format("%.0f", number) end

-- Return nil where a script may be submitted, else why not. The text is requests.lua, put here by `forebay slurm install`:
-- compiling it costs more than any call but this one.
function forebay.check(text, site)
  (loadstring or load)(forebay.REQUESTS, "=requests.lua")() -- which is where forebay.check is, from then on
  return forebay.check(text, site)
end

-- ---- in slurmctld

-- Where no news came yet, or none for long: since when.
local function away(site)
  local host = site and site.host or "this host"
  local since = site and site.written and " since " .. site.written or ""
  return "the buffer is not available on " .. host .. " (bridge not running" .. since .. "); try again, or submit without it"
end

function slurm_bb_job_process(script, uid)
  local site, fresh = news("site.json")
  if not site or (not fresh and site.away ~= "accept") then return slurm.ERROR, away(site) end
  local text = slurp(script, SCRIPT_BYTES_MAX + 1)
  if not text then return slurm.ERROR, "the script cannot be read, or has more than " .. forebay.integer(SCRIPT_BYTES_MAX) .. " bytes" end
  text = text:gsub("%z+$", "") -- as Slurm writes some of its files
  -- From 24.05 on Slurm says whose job it is.
  uid = tonumber(uid)
  if uid and site.users then
    if site.users.allow and not is_among(uid, site.users.allow) then return slurm.ERROR, "User not found in AllowUsers" end
    if site.users.deny and is_among(uid, site.users.deny) then return slurm.ERROR, "User found in DenyUsers" end
  end
  local fine, why = pcall(forebay.check, text, site)
  -- A fault of this script, or tables of another release: Forebay itself reads the request in `setup`.
  if fine and why then return slurm.ERROR, why end
  return slurm.SUCCESS
end

function slurm_bb_pools()
  local found, fresh = news("pools.json")
  if not found or type(found.pools) ~= "table" then return slurm.SUCCESS end
  local rows = {}
  for index, pool in ipairs(found.pools) do
    rows[index] = string.format('{"id":"%s","quantity":%s,"granularity":%s,"free":%s}', pool.id, forebay.integer(pool.quantity),
      forebay.integer(pool.granularity), fresh and forebay.integer(pool.free) or "0")
  end
  return slurm.SUCCESS, '{"pools":[' .. table.concat(rows, ",") .. "]}"
end

function slurm_bb_paths(job, script, file)
  job = tostring(job)
  local text = job:find("^[0-9]+$") and slurp(RUN .. "/paths/" .. job, FILE_BYTES_MAX)
  if not text then return slurm.ERROR, "Forebay has no buffer of job " .. job .. " on this host" end
  local into = io.open(file, "w")
  if not into then return slurm.ERROR, file .. " cannot be written" end
  local written = into:write(text)
  local closed = into:close()
  if not written or not closed then return slurm.ERROR, file .. " cannot be written" end
  return slurm.SUCCESS
end

-- ---- in slurmscriptd

local function read_all(file)
  local parts, size = {}, 0
  while size < ANSWER_BYTES_MAX do
    local part = file:read(4096)
    if not part then break end
    parts[#parts + 1], size = part, size + #part
  end
  return table.concat(parts)
end

-- Take a FIFO for an answer: Lua can make none, but of those that rename one, one succeeds. Its new name says whose it
-- is, so it can never be taken for another call's. Return that name, or nil where none is left, or no bridge.
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
  file:setvbuf("full", REQUEST_BYTES_MAX + 1) -- in one piece: others write to the same FIFO
  local written = file:write(text)
  return file:close() and written
end

-- Return the bridge's answer, empty where there is none: no bridge, or it ended. The FIFO for requests is opened for
-- both directions, which never waits and makes no file where there is none.
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

-- Ask the bridge; return slurm's code and a text. An answer is a word, a line break and a text: `ok`, `fail`, `busy`.
-- What comes cut short, since somebody was ended, is asked for again; and nothing but `ok` is ever a success: Slurm would
-- take a timeout for one.
local function ask(name, words, script)
  for index, word in ipairs(words) do words[index] = tostring(word) end
  while true do
    local word, text = exchange(name, words, script):match("^(%l+)\n(.*)$")
    if word == "ok" then
      if text ~= "" then return slurm.SUCCESS, text end
      return slurm.SUCCESS
    end
    if word == "busy" then return slurm.SUCCESS, slurm.SLURM_BB_BUSY or "BUSY" end
    if word == "fail" then return slurm.ERROR, text end
    local slept = os.execute("sleep " .. AWAY_WAIT_S)
    if slept ~= 0 and slept ~= true then return slurm.ERROR, name .. " was ended while no bridge answered" end
  end
end

function slurm_bb_setup(job, uid, gid, pool, size, script)
  local text = slurp(script, SCRIPT_BYTES_MAX + 1)
  if not text then return slurm.ERROR, "the job's script cannot be read, or is too long" end
  -- What Slurm makes of a script with its symbols replaced ends in a zero byte.
  return ask("setup", { job, uid, gid, pool, size }, (text:gsub("%z+$", "")))
end

-- From 24.05 on there are five arguments, and somebody who asks again.
function slurm_bb_data_in(job, script, uid, gid, info)
  return ask(info ~= nil and "begin_data_in" or "data_in", { job })
end

function slurm_bb_test_data_in(job) return ask("test_data_in", { job }) end

-- What `setup` was given is what there is: a size that is larger is not compared with the pool.
function slurm_bb_real_size() return slurm.SUCCESS end

function slurm_bb_pre_run(job) return ask("pre_run", { job }) end

function slurm_bb_post_run(job) return ask("post_run", { job }) end

function slurm_bb_data_out(job, script, uid, gid, info)
  return ask(info ~= nil and "begin_data_out" or "data_out", { job })
end

function slurm_bb_test_data_out(job) return ask("test_data_out", { job }) end

function slurm_bb_job_teardown(job, script, hurry) return ask("teardown", { job, hurry }) end

function slurm_bb_get_status(...) return ask("get_status", { ... }) end

-- The rest is requests.lua.
forebay.REQUESTS = "@REQUESTS@"
