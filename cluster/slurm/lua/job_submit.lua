-- A check for a site's job_submit.lua: rejects `--bb` without a directive. burst_buffer/lua ignores such a text, so the
-- job would run without its buffer (sbatch; srun and salloc reject it themselves).
--
-- In job_submit.lua:
--   local check_buffer = dofile("/etc/slurm/forebay-job-submit.lua")
--   function slurm_job_submit(job, partitions, uid)
--     local code = check_buffer(job)
--     if code ~= slurm.SUCCESS then return code end
--     return slurm.SUCCESS -- or continue with the site's own checks
--   end

-- This line is written by `forebay slurm install`.
local DIRECTIVE = "#BB_LUA"

-- Return slurm.SUCCESS, or print an error for the user and return the code with which Slurm rejects the job.
return function(job)
  local text = job.burst_buffer
  if type(text) ~= "string" or not text:find("%S") then return slurm.SUCCESS end
  for line in text:gmatch("[^\r\n]+") do
    if line:sub(1, #DIRECTIVE) == DIRECTIVE then return slurm.SUCCESS end
  end
  slurm.log_user("burst_buffer/lua: --bb has no " .. DIRECTIVE .. " directive, so the job would have no buffer; write --bb=\""
    .. DIRECTIVE .. " pool=NAME capacity=10GiB\"")
  return slurm.ESLURM_INVALID_BURST_BUFFER_REQUEST or slurm.ERROR
end
