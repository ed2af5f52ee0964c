-- Forebay as the burst buffer of an unmodified Slurm (22.05 and newer; Lua 5.1 to 5.4).
--
-- Slurm compiles this file anew for each call of any function, so it is short: what a call needs besides is in parts that
-- `forebay slurm bridge` keeps in RUN/lua, of its own release, and that call alone compiles them.
--
-- `pools`, `paths` and `job_process` run inside slurmctld, under its locks: they open local files of the bridge, and
-- nothing else. No process, no socket, nothing that could wait. The other functions run in slurmscriptd: one exchange
-- with the bridge through two FIFOs. No process is started, and nobody waits but Slurm's own.

-- This line is written by `forebay slurm install`.
local RUN = "/run/forebay-slurm"

local PATHS_BYTES_MAX = 1024 * 1024 -- of the variables of one job
local AWAY_WAIT_S = 3 -- between two questions while no bridge answers

-- Return what a part is made of, nil while no bridge has put it there.
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

-- What `setup` was given is what there is: a size that is larger is not compared with the pool.
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
