-- Part of burst_buffer.lua for slurmctld: `job_process` and `pools`. They only read local files of the bridge.

local RUN = ...

local SCRIPT_BYTES_MAX = 256 * 1024 -- also Forebay's limit
local FILE_BYTES_MAX = 1024 * 1024 -- largest site.json or pools.json: a thousand pools
local DEPTH_MAX = 16 -- deepest nesting of a JSON file: site.json has five levels

local function slurp(path, most)
  local file = io.open(path, "rb")
  if not file then return nil end
  local text = file:read(most + 1)
  file:close()
  if text == nil then return "" end
  if #text > most then return nil end
  return text
end

local function integer(number) return string.format("%.0f", number) end

local function is_among(value, values)
  for _, one in ipairs(values) do
    if one == value then return true end
  end
  return false
end

-- ---- files of the bridge

-- Strict, bounded JSON parser. It returns nil for invalid text, and leaves null values out of tables.
local ESCAPES = { ['"'] = '"', ["\\"] = "\\", ["/"] = "/", b = "\b", f = "\f", n = "\n", r = "\r", t = "\t" }

local function utf8_of(code)
  if code < 0x80 then return string.char(code) end
  if code < 0x800 then return string.char(0xC0 + math.floor(code / 64), 0x80 + code % 64) end
  return string.char(0xE0 + math.floor(code / 4096), 0x80 + math.floor(code / 64) % 64, 0x80 + code % 64)
end

local function read_json(text)
  local at = 1
  local value
  local function fault() error("json", 0) end
  -- Return the next non-blank character, and advance past it.
  local function next_one()
    local one, after = text:match("^[ \t\r\n]*(.)()", at)
    at = after or fault()
    return one
  end
  local function quoted() -- the rest of a string, after its opening quote
    local plain, after = text:match('^([^%c"\\]*)"()', at)
    if plain then
      at = after
      return plain
    end
    local parts = {}
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
    local one = next_one()
    while one ~= "]" do
      found[#found + 1] = value(one, depth)
      one = next_one()
      if one == "," then
        one = next_one()
        if one == "]" then fault() end
      elseif one ~= "]" then
        fault()
      end
    end
    return found
  end
  local function keyed(depth)
    local found = {}
    local one = next_one()
    while one ~= "}" do
      if one ~= '"' then fault() end
      local key = quoted()
      if next_one() ~= ":" then fault() end
      found[key] = value(next_one(), depth)
      one = next_one()
      if one == "," then
        one = next_one()
        if one == "}" then fault() end
      elseif one ~= "}" then
        fault()
      end
    end
    return found
  end
  -- Return the value whose first character was just read.
  value = function(first, depth)
    if depth > DEPTH_MAX then fault() end
    if first == '"' then return quoted() end
    if first == "[" then return listed(depth + 1) end
    if first == "{" then return keyed(depth + 1) end
    local word, after = text:match("^(%a+)()", at - 1)
    if word then
      at = after
      if word == "null" then return nil end
      if word ~= "true" and word ~= "false" then fault() end
      return word == "true"
    end
    local number, behind = text:match("^(-?%d+%.?%d*[eE]?[+-]?%d*)()", at - 1)
    at = behind or fault()
    return tonumber(number) or fault()
  end
  local whole, found = pcall(function()
    local all = value(next_one(), 1)
    if text:find("[^ \t\r\n]", at) then fault() end
    return all
  end)
  if not whole or type(found) ~= "table" then return nil end
  return found
end

local function uptime_s()
  local text = slurp("/proc/uptime", 256)
  return text and tonumber(text:match("^%d+%.?%d*"))
end

-- Return a file of the bridge, and whether the file is still valid. Times are the machine's uptime, which setting the
-- clock does not change. A file from before a reboot would be from the future, and so invalid; a tmpfs keeps no such file.
local function news(name)
  local text = slurp(RUN .. "/" .. name, FILE_BYTES_MAX)
  local found = text and read_json(text)
  if not found then return nil, false end
  local now_s, until_s, lasts_s = uptime_s(), tonumber(found["until"]), tonumber(found.lasts)
  if not now_s or not until_s or not lasts_s then return found, false end
  return found, now_s <= until_s and until_s <= now_s + lasts_s
end

-- Return the check of requests (requests.lua). Compiling dominates the cost of a call, so the first call caches the
-- compiled code. Each bridge chooses a new name for the cached file, so code of an earlier boot or release is never read.
local function make_check(site, fresh)
  local name = fresh and type(site.compiled) == "string" and site.compiled:match("^%x+$")
  local kept = name and RUN .. "/lua/" .. name .. "." .. _VERSION:gsub("[^%w.]", "")
  local chunk = kept and loadfile(kept)
  if not chunk then
    chunk = assert(loadfile(RUN .. "/lua/requests.lua"))
    local beside = kept and kept .. "." .. tostring({}):match("%w+$") -- two calls may run at the same time
    local file = beside and io.open(beside, "wb")
    if file then
      local written = file:write(string.dump(chunk, true))
      if file:close() and written then os.rename(beside, kept) else os.remove(beside) end
    end
  end
  return chunk(SCRIPT_BYTES_MAX, integer, is_among)
end

-- ---- calls

-- Return the error for a missing or outdated site.json, with the time of its last update.
local function away(site)
  local host = site and site.host or "this host"
  local since = site and site.written and " since " .. site.written or ""
  return "the buffer is not available on " .. host .. " (bridge not running" .. since .. "); try again, or submit without it"
end

local function job_process(script, uid)
  local site, fresh = news("site.json")
  if not site or (not fresh and site.away ~= "accept") then return slurm.ERROR, away(site) end
  local text = slurp(script, SCRIPT_BYTES_MAX + 1)
  if not text then return slurm.ERROR, "the script cannot be read, or has more than " .. integer(SCRIPT_BYTES_MAX) .. " bytes" end
  text = text:gsub("%z+$", "") -- Slurm ends some of its files with zero bytes
  -- From 23.02 on Slurm passes the user's uid.
  uid = tonumber(uid)
  if uid and site.users then
    if site.users.allow and not is_among(uid, site.users.allow) then return slurm.ERROR, "User not found in AllowUsers" end
    if site.users.deny and is_among(uid, site.users.deny) then return slurm.ERROR, "User found in DenyUsers" end
  end
  local fine, why = pcall(function() return make_check(site, fresh)(text, site) end)
  -- Ignore an error of the check itself, or tables of another release: `setup` checks the request again.
  if fine and why then return slurm.ERROR, why end
  return slurm.SUCCESS
end

local function pools()
  local found, fresh = news("pools.json")
  if not found or type(found.pools) ~= "table" then return slurm.SUCCESS end
  local rows = {}
  for index, pool in ipairs(found.pools) do
    rows[index] = string.format('{"id":"%s","quantity":%s,"granularity":%s,"free":%s}', pool.id, integer(pool.quantity),
      integer(pool.granularity), fresh and integer(pool.free) or "0")
  end
  return slurm.SUCCESS, '{"pools":[' .. table.concat(rows, ",") .. "]}"
end

-- Return the word that begins Forebay's directives, or nil if no bridge has written it yet.
local function directive()
  local site = news("site.json")
  return site and site.directive
end

return { job_process = job_process, directive = directive, pools = pools, read_json = read_json, make_check = make_check }
