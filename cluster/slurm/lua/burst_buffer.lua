-- Forebay as the burst buffer of an unmodified Slurm (22.05 and newer; Lua 5.1 to 5.4).
--
-- Slurm compiles this file again for each call of a function, so the file is short. The other code is in parts, which
-- `forebay run bridge` writes to RUN/lua. A call compiles only the part that it needs.
--
-- `pools`, `paths` and `job_process` run inside slurmctld, under its locks. They only read local files of the bridge:
-- they start no process, open no socket and never wait. The other functions run in slurmscriptd, and exchange one
-- request and reply with the bridge through two FIFOs.

-- These lines are written by `forebay slurm install`.
local RUN = "/run/forebay-slurm"
local SITE = "/etc/slurm/burst_buffer.site.lua" -- the site's own script, if it exists

local PATHS_BYTES_MAX = 1024 * 1024 -- variables of one job
local AWAY_WAIT_S = 3 -- interval between two requests while no bridge replies

-- Load a part; return nil if no bridge has written it.
local function part(name)
  local chunk = loadfile(RUN .. "/lua/" .. name .. ".lua")
  return chunk and chunk(RUN)
end

-- ---- in slurmctld

function slurm_bb_job_process(...)
  local slurmctld = part("slurmctld")
  if slurmctld then return slurmctld.job_process(...) end
  return slurm.ERROR, "the buffer is not available on this host (bridge not running); try again, or submit without it"
end

function slurm_bb_pools()
  local slurmctld = part("slurmctld")
  if slurmctld then return slurmctld.pools() end
  return slurm.SUCCESS
end

function slurm_bb_paths(job, script, file)
  job = tostring(job)
  local from = job:find("^[0-9]+$") and io.open(RUN .. "/paths/" .. job, "rb")
  if not from then return slurm.ERROR, "Forebay has no buffer of job " .. job .. " on this host" end
  local text = from:read(PATHS_BYTES_MAX) or ""
  from:close()
  local into = io.open(file, "w")
  if not into then return slurm.ERROR, file .. " cannot be written" end
  local written = into:write(text)
  local closed = into:close()
  if not written or not closed then return slurm.ERROR, file .. " cannot be written" end
  return slurm.SUCCESS
end

-- The size passed to `setup` is the real size. (Slurm does not compare a larger real size with the pool.)
function slurm_bb_real_size() return slurm.SUCCESS end

-- ---- in slurmscriptd

local function called(name, ...)
  while true do
    local slurmscriptd = part("slurmscriptd")
    if slurmscriptd then return slurmscriptd[name](...) end
    local slept = os.execute("sleep " .. AWAY_WAIT_S)
    if slept ~= 0 and slept ~= true then return slurm.ERROR, name .. " was ended while no bridge ran" end
  end
end

function slurm_bb_setup(...) return called("setup", ...) end

function slurm_bb_data_in(...) return called("data_in", ...) end

function slurm_bb_test_data_in(...) return called("test_data_in", ...) end

function slurm_bb_pre_run(...) return called("pre_run", ...) end

function slurm_bb_post_run(...) return called("post_run", ...) end

function slurm_bb_data_out(...) return called("data_out", ...) end

function slurm_bb_test_data_out(...) return called("test_data_out", ...) end

function slurm_bb_job_teardown(...) return called("job_teardown", ...) end

function slurm_bb_get_status(...) return called("get_status", ...) end

-- ---- the site's own script

-- The first line of the site's script names a directive, for example `-- directive: BB_LUA`. Jobs with this directive
-- are passed to the site's script, all others to Forebay. The site's script is compiled only for its own jobs, so errors
-- in it do not affect Forebay's jobs.
local function site_directive()
  local file = io.open(SITE, "r")
  if not file then return nil end
  local first = file:read("*l") or ""
  file:close()
  return first:match("^%-%- directive: ([%w_]+)%s*$")
end

-- Call a function of the site's script, which has its own global variables, because both scripts define the same functions.
local function of_site(name, ...)
  local own = setmetatable({}, { __index = _G })
  local chunk, fault = loadfile(SITE, "t", own)
  if chunk and setfenv then setfenv(chunk, own) end -- Lua 5.1
  local loaded = false
  if chunk then loaded, fault = pcall(chunk) end
  if not loaded then return slurm.ERROR, tostring(fault) end
  local called_one = rawget(own, "slurm_bb_" .. name)
  if not called_one then return slurm.SUCCESS end -- the script was written for an earlier release of Slurm
  return called_one(...)
end

-- Open a job's script. From 24.11 on, Slurm creates no files for a task that it splits from a job array. The script is
-- then in the directory of the array; the last argument has the ID of the array.
local function open_script(path, info)
  local file = io.open(path, "rb")
  local array = not file and type(info) == "table" and tonumber(info.array_job_id)
  local state = array and path:match("^(/.*)/hash%.%d/job%.%d+/script$")
  if not state then return file end
  return io.open(string.format("%s/hash.%d/job.%d/script", state, array % 10, array), "rb")
end

-- Return whether a script has a directive, or nil if the script cannot be read. As in Slurm, the search ends at the
-- first line that is neither a comment nor empty.
local function has(directive, path, info)
  local file = open_script(path, info)
  if not file then return nil end
  local found = false
  for line in file:lines() do
    if line:find("^[^#]") then break end
    found = found or line:match("^#([%w_]+)") == directive
  end
  file:close()
  return found
end

local SCRIPT_AT = { -- function -> position of the argument with the path of the job's script
  job_process = 1, setup = 6, data_in = 2, test_data_in = 2, paths = 2, pre_run = 2, post_run = 2, data_out = 2,
  test_data_out = 2, job_teardown = 2,
}

local function share(theirs)
  local ours = {}
  for name, at in pairs(SCRIPT_AT) do
    ours[name] = _G["slurm_bb_" .. name]
    _G["slurm_bb_" .. name] = function(...)
      if has(theirs, (select(at, ...)), (select(select("#", ...), ...))) then return of_site(name, ...) end
      return ours[name](...)
    end
  end
  local process, teardown, pools, status = slurm_bb_job_process, slurm_bb_job_teardown, slurm_bb_pools, slurm_bb_get_status

  function slurm_bb_job_process(path, ...)
    local slurmctld = part("slurmctld")
    local own = slurmctld and slurmctld.directive and slurmctld.directive()
    if own and own ~= theirs and has(theirs, path) and has(own, path) then
      return slurm.ERROR, "the job has directives of two burst buffers, #" .. own .. " and #" .. theirs .. "; use one of them"
    end
    return process(path, ...)
  end

  -- If the job's script was deleted, its directive is unknown. Then call both scripts: each ignores jobs of the other.
  function slurm_bb_job_teardown(job, path, ...)
    if has(theirs, path) ~= nil then return teardown(job, path, ...) end
    local code, text = ours.job_teardown(job, path, ...)
    if code ~= slurm.SUCCESS then return code, text end
    return of_site("job_teardown", job, path, ...)
  end

  -- Slurm passes no script path here, but Forebay's jobs already have a file of variables.
  function slurm_bb_real_size(job, ...)
    local file = io.open(RUN .. "/paths/" .. tostring(job), "rb")
    if not file then return of_site("real_size", job, ...) end
    file:close()
    return slurm.SUCCESS
  end

  function slurm_bb_pools()
    local code, text = pools()
    local fine, their_code, their_text = pcall(of_site, "pools")
    local rows = fine and their_code == slurm.SUCCESS and type(their_text) == "string"
      and their_text:match('"pools"%s*:%s*%[(.*%S)%s*%]')
    if code ~= slurm.SUCCESS or not rows then return code, text end
    if not text or text == '{"pools":[]}' then return code, '{"pools":[' .. rows .. "]}" end
    return code, text:gsub("%]}$", function() return "," .. rows .. "]}" end) .. ""
  end

  -- `scontrol show bbstat lua site …` is passed to the site's script. Slurm also passes the plugin's name, and from
  -- 23.02 on the user's uid and gid before it.
  function slurm_bb_get_status(...)
    local words = { ... }
    for at = 1, math.min(#words, 4) do
      if words[at] == "site" then
        table.remove(words, at)
        return of_site("get_status", (table.unpack or unpack)(words))
      end
    end
    return status(...)
  end
end

local theirs = site_directive()
if theirs then share(theirs) end
