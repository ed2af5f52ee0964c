-- A script in the style of a site that stages with Conduit: directives are `#CONDUIT_PRE cp SOURCE DESTINATION` before
-- the job and `#CONDUIT_POST cp SOURCE DESTINATION` after it. Copies run in the background and leave one file each in
-- a directory of the transfer when they have ended; the polling functions look for these files.
local PREFIX = "CONDUIT"
local DIRECTORY = os.getenv("SITE_LOG") .. ".transfers"

local function quoted(text) return "'" .. text:gsub("'", "'\\''") .. "'" end

local function lines_of(path, when)
  local found = {}
  for line in io.lines(path) do
    if line:sub(1, 1) ~= "#" then break end
    local source, destination = line:match("^#" .. PREFIX .. "_" .. when .. "%s+cp%s+(%S+)%s+(%S+)$")
    if source then found[#found + 1] = {source = source, destination = destination} end
  end
  return found
end

local function transfer_of(info, when)
  return string.format("%s/%s.%d.%d.%s", DIRECTORY, info.cluster, info.job_id, info.restart_cnt, when)
end

local function start(script, info, when)
  local transfer = transfer_of(info, when)
  if not os.execute("mkdir -p " .. quoted(transfer)) then return slurm.ERROR, "cannot make " .. transfer end
  for number, copy in ipairs(lines_of(script, when)) do
    local result = transfer .. "/" .. number
    slurm.log_info("%s: JobId=%u copies %s to %s", info.user_name, info.job_id, copy.source, copy.destination)
    os.execute(string.format(
      "{ sleep 0.2; cp %s %s 2>%s.said; echo $? >%s.new; mv %s.new %s; } >/dev/null 2>&1 &",
      quoted(copy.source), quoted(copy.destination), quoted(result), quoted(result), quoted(result), quoted(result)))
  end
  return slurm.SUCCESS
end

local function poll(script, info, when)
  local transfer = transfer_of(info, when)
  for number, copy in ipairs(lines_of(script, when)) do
    local file = io.open(transfer .. "/" .. number)
    if not file then return slurm.SUCCESS, slurm.SLURM_BB_BUSY end
    local code = file:read("n")
    file:close()
    if code ~= 0 then return slurm.ERROR, "cp of " .. copy.source .. " ended with " .. code end
  end
  return slurm.SUCCESS
end

function slurm_bb_job_process(script, uid, gid, info)
  local copies = #lines_of(script, "PRE") + #lines_of(script, "POST")
  if copies == 0 then return slurm.ERROR, "write #CONDUIT_PRE cp SOURCE DESTINATION" end
  slurm.log_info("user %s (%s) submits %s with %d copies", info.user_name, uid, info.name, copies)
  return slurm.SUCCESS
end
function slurm_bb_pools() return slurm.SUCCESS end
function slurm_bb_setup(job, uid, gid, pool, size, script, info) return slurm.SUCCESS end
function slurm_bb_data_in(job, script, uid, gid, info) return start(script, info, "PRE") end
function slurm_bb_test_data_in(job, script, uid, gid, info) return poll(script, info, "PRE") end
function slurm_bb_real_size(job, uid, gid, info) return slurm.SUCCESS end
function slurm_bb_paths(job, script, path_file, uid, gid, info)
  local file = io.open(path_file, "w")
  file:write("CONDUIT_TRANSFER=", transfer_of(info, "PRE"), "\n")
  file:close()
  return slurm.SUCCESS
end
function slurm_bb_pre_run(job, script, uid, gid, info)
  slurm.log_info("complete job:\n%s", select(2, slurm.job_info_to_string(info)))
  if info.gres_detail_cnt ~= 0 then slurm.log_info("gres %s", table.concat(info.gres_detail_str, ",")) end
  return slurm.SUCCESS
end
function slurm_bb_post_run(job, script, uid, gid, info) return slurm.SUCCESS end
function slurm_bb_data_out(job, script, uid, gid, info) return start(script, info, "POST") end
function slurm_bb_test_data_out(job, script, uid, gid, info) return poll(script, info, "POST") end
function slurm_bb_job_teardown(job, script, hurry, uid, gid)
  os.execute("rm -rf " .. quoted(DIRECTORY))
  return slurm.SUCCESS
end
function slurm_bb_get_status(uid, gid, ...) return slurm.SUCCESS, slurm.to_json({uid = uid, arguments = {...}}) end
