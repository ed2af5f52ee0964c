-- A site's script for tests: it logs each call with its arguments, and does what the job's own directive line says,
-- `#BB_LUA do=OPERATION:ACTION[:ARGUMENT]`.
local LOG = os.getenv("SITE_LOG")

local function arguments_of(...)
  local shown = {}
  for number = 1, select("#", ...) do
    local value = select(number, ...)
    shown[number] = type(value) == "table" and "{job_id=" .. tostring(value.job_id) .. "}" or tostring(value)
  end
  return table.concat(shown, " ")
end

local actions = {}

function actions.fail(text) return slurm.ERROR, (text:gsub("_", " ")) end
function actions.code(text) return tonumber(text) end
function actions.say(text) return slurm.SUCCESS, text end
function actions.nothing() end
function actions.none() return nil end
function actions.yes() return true end
function actions.word(text) return "error", (text:gsub("_", " ")) end
function actions.digits(text) return text, "fine" end
function actions.number() return slurm.SUCCESS, 4096 end
function actions.table() return slurm.SUCCESS, {} end
function actions.flag() return slurm.SUCCESS, true end
function actions.raise(text) error(text) end
function actions.sleep(text) os.execute("exec sleep " .. text) return slurm.SUCCESS end
function actions.deaf(text) os.execute("trap '' TERM; sleep " .. text .. "; true") return slurm.SUCCESS end
function actions.fork(text)
  os.execute("trap '' TERM; setsid sh -c \"trap '' TERM; exec sleep " .. text .. "\" & sleep " .. text)
  return slurm.SUCCESS
end
function actions.spin() while true do end end
function actions.grow() local all = {} while true do all[#all + 1] = ("x"):rep(1024) .. #all end end
function actions.flood() for _ = 1, 40000 do print(("x"):rep(100)) io.stderr:write(("y"):rep(100)) end return slurm.SUCCESS end
function actions.background(text) os.execute("sleep " .. text .. " >/dev/null 2>&1 &") return slurm.SUCCESS end
function actions.leave() os.exit(7) end
function actions.read() local pipe = io.popen("echo read; exit 5") local text = pipe:read("a") local _, _, code = pipe:close()
  return slurm.ERROR, text:gsub("\n", "") .. " " .. tostring(code) end
function actions.python() return slurm.ERROR, tostring(python) end

local function directive(path)
  local file = path and io.open(path)
  local words = {}
  if file then
    for line in file:lines() do
      if line:match("^#BB_LUA") then
        for operation, action in line:gmatch("do=([%w_]+):(%S+)") do words[operation] = action end
      end
    end
    file:close()
  end
  return words
end

local function perform(operation, script, ...)
  local file = io.open(LOG, "a")
  file:write(operation, " ", arguments_of(...), "\n")
  file:close()
  local wanted = directive(script)[operation]
  if not wanted then return slurm.SUCCESS end
  local action, rest = wanted:match("^(%w+):?(.*)$")
  return actions[action](rest)
end

function slurm_bb_job_process(script, ...) return perform("process", script, script, ...) end
function slurm_bb_pools() return slurm.SUCCESS, '{"pools": [{"id": "fast", "quantity": 5, "granularity": 1048576}]}' end
function slurm_bb_job_teardown(job, script, ...) return perform("teardown", script, job, script, ...) end
function slurm_bb_setup(job, uid, gid, pool, size, script, ...)
  return perform("setup", script, job, uid, gid, pool, size, script, ...)
end
function slurm_bb_data_in(job, script, ...) return perform("data_in", script, job, script, ...) end
function slurm_bb_test_data_in(job, script, ...)
  local counter = LOG .. "." .. job
  local file = io.open(counter)
  local number = file and tonumber(file:read("a")) or 0
  if file then file:close() end
  local busy = tonumber(directive(script).busy or "0")
  if number >= busy then return slurm.SUCCESS end
  file = io.open(counter, "w") file:write(number + 1) file:close()
  return slurm.SUCCESS, number % 2 == 0 and slurm.SLURM_BB_BUSY or "BUSY"
end
function slurm_bb_real_size(job, ...)
  perform("real_size", nil, job, ...)
  local size = os.getenv("SITE_SIZE")
  if size then return slurm.SUCCESS, size end
end
function slurm_bb_paths(job, script, path_file, ...)
  local file = io.open(path_file, "w")
  file:write("BB_PLACE=/bb/", job, "\nDW_JOB_STRIPED=/bb/striped\n")
  file:close()
  return perform("paths", script, job, script, path_file, ...)
end
function slurm_bb_pre_run(job, script, ...) return perform("pre_run", script, job, script, ...) end
function slurm_bb_post_run(job, script, ...) return perform("post_run", script, job, script, ...) end
function slurm_bb_data_out(job, script, ...) return perform("data_out", script, job, script, ...) end
function slurm_bb_get_status(...) return slurm.SUCCESS, arguments_of(...) .. "\n" end
