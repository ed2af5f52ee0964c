-- A site's script for the tests: what the job's own directives say, it does. `wait_OP=SECONDS` makes an operation
-- slow, `fail_OP=WORDS_WITH_UNDERSCORES` makes it fail and say so, `once_OP=yes` makes it fail the first time only.
-- What it is told, it notes in log/calls.log: `TIME OP start ARGUMENTS`, `TIME OP end rc=N ARGUMENTS`.

local directory = "@RUN@"

local function read_all(path)
  local file = io.open(path)
  if file == nil then return "" end
  local text = file:read("*a")
  file:close()
  return text
end

local function wish(script, key)
  local found
  for line in read_all(script):gmatch("[^\n]+") do
    if line:find("^#BB_LUA") then
      found = line:match("%s" .. key .. "=(%S+)") or found
    end
  end
  return found
end

local function happened_before(operation, job)
  local path = directory .. "/log/" .. operation .. "." .. job
  local before = read_all(path) ~= ""
  local file = io.open(path, "w")
  if file ~= nil then
    file:write("yes")
    file:close()
  end
  return before
end

local function note(operation, what, ...)
  local file = io.open(directory .. "/log/calls.log", "a")
  if file == nil then return end
  file:write(os.date("%H:%M:%S"), " ", operation, " ", what, " ", table.concat({ ... }, " "), "\n")
  file:close()
end

local function wished(operation, job, script)
  local seconds = wish(script, "wait_" .. operation)
  if seconds ~= nil then os.execute("sleep " .. tonumber(seconds)) end
  local words = wish(script, "fail_" .. operation)
  local before = happened_before(operation, job)
  if words == nil then return slurm.SUCCESS end
  if wish(script, "once_" .. operation) ~= nil and before then return slurm.SUCCESS end
  return slurm.ERROR, (words:gsub("_", " "))
end

local function perform(operation, job, script, ...)
  note(operation, "start", ...)
  local code, words = wished(operation, job, script)
  note(operation, "end rc=" .. code, ...)
  if words == nil then return code end
  return code, words
end

function slurm_bb_job_process(script) return perform("process", "any", script, script) end

function slurm_bb_pools() return slurm.SUCCESS, read_all(directory .. "/pools.json") end

function slurm_bb_setup(job, uid, gid, pool, size, script) return perform("setup", job, script, job, uid, gid, pool, size, script) end

function slurm_bb_data_in(job, script) return perform("data_in", job, script, job, script) end

function slurm_bb_test_data_in() return slurm.SUCCESS end

function slurm_bb_real_size() return slurm.SUCCESS end

function slurm_bb_paths(job, script, paths)
  local file = io.open(paths, "w")
  file:write("SITE_BUFFER=/buffers/" .. job .. "\n")
  file:close()
  return perform("paths", job, script, job, script, paths)
end

function slurm_bb_pre_run(job, script) return perform("pre_run", job, script, job, script) end

function slurm_bb_post_run(job, script) return perform("post_run", job, script, job, script) end

function slurm_bb_data_out(job, script) return perform("data_out", job, script, job, script) end

function slurm_bb_test_data_out() return slurm.SUCCESS end

function slurm_bb_job_teardown(job, script, hurry)
  return perform("teardown", job, script, job, script, "hurry=" .. hurry)
end

function slurm_bb_get_status(...) return slurm.SUCCESS, "asked for " .. table.concat({ ... }, " and ") .. "\n" end
