-- A script that reads every field of the job table, and logs each as `FUNCTION FIELD=VALUE`. A value of another type than
-- Slurm's fails the call. The list is Slurm's own: field, type, first release, last release unless it is the newest.
local FIELDS = {
  {"account", "string", "23.02"},
  {"accrue_time", "integer", "23.02"},
  {"admin_comment", "string", "23.02"},
  {"alloc_node", "string", "23.02"},
  {"alloc_sid", "integer", "23.02"},
  {"array_job_id", "integer", "23.02"},
  {"array_task_id", "integer", "23.02"},
  {"array_max_tasks", "integer", "23.02"},
  {"array_task_str", "string", "23.02"},
  {"assoc_id", "integer", "23.02"},
  {"batch_features", "string", "23.02"},
  {"batch_flag", "integer", "23.02"},
  {"batch_host", "string", "23.02"},
  {"boards_per_node", "integer", "23.02"},
  {"burst_buffer", "string", "23.02"},
  {"burst_buffer_state", "string", "23.02"},
  {"cluster", "string", "23.02"},
  {"cluster_features", "string", "23.02"},
  {"command", "string", "23.02"},
  {"comment", "string", "23.02"},
  {"container", "string", "23.02"},
  {"container_id", "string", "23.02"},
  {"contiguous", "integer", "23.02"},
  {"core_spec", "integer", "23.02"},
  {"cores_per_socket", "integer", "23.02"},
  {"billable_tres", "number", "23.02"},
  {"cpus_per_task", "integer", "23.02"},
  {"cpu_freq_min", "integer", "23.02"},
  {"cpu_freq_max", "integer", "23.02"},
  {"cpu_freq_gov", "integer", "23.02"},
  {"cpus_per_tres", "string", "23.02"},
  {"cronspec", "string", "23.02"},
  {"deadline", "integer", "23.02"},
  {"delay_boot", "integer", "23.02"},
  {"dependency", "string", "23.02"},
  {"derived_ec", "integer", "23.02"},
  {"eligible_time", "integer", "23.02"},
  {"end_time", "integer", "23.02"},
  {"exc_nodes", "string", "23.02"},
  {"exit_code", "integer", "23.02"},
  {"features", "string", "23.02"},
  {"fed_origin_str", "string", "23.02"},
  {"fed_siblings_active_str", "string", "23.02"},
  {"fed_siblings_viable_str", "string", "23.02"},
  {"gres_detail_cnt", "integer", "23.02"},
  {"gres_detail_str", "table", "23.02"},
  {"gres_total", "string", "23.02"},
  {"group_id", "integer", "23.02"},
  {"het_job_id", "integer", "23.02"},
  {"het_job_id_set", "string", "23.02"},
  {"het_job_offset", "integer", "23.02"},
  {"job_id", "integer", "23.02"},
  {"job_state", "integer", "23.02"},
  {"last_sched_eval", "integer", "23.02"},
  {"licenses", "string", "23.02"},
  {"mail_type", "integer", "23.02"},
  {"mail_user", "string", "23.02"},
  {"max_cpus", "integer", "23.02"},
  {"max_nodes", "integer", "23.02"},
  {"mcs_label", "string", "23.02"},
  {"mem_per_tres", "string", "23.02"},
  {"min_mem_per_node", "integer", "23.02"},
  {"min_mem_per_cpu", "integer", "23.02"},
  {"name", "string", "23.02"},
  {"network", "string", "23.02"},
  {"nodes", "string", "23.02"},
  {"nice", "integer", "23.02"},
  {"ntasks_per_core", "integer", "23.02"},
  {"ntasks_per_tres", "integer", "23.02"},
  {"ntasks_per_node", "integer", "23.02"},
  {"ntasks_per_socket", "integer", "23.02"},
  {"ntasks_per_board", "integer", "23.02"},
  {"num_cpus", "integer", "23.02"},
  {"num_nodes", "integer", "23.02"},
  {"num_tasks", "integer", "23.02"},
  {"partition", "string", "23.02"},
  {"prefer", "string", "23.02"},
  {"pn_min_cpus", "integer", "23.02"},
  {"pn_min_tmp_disk", "integer", "23.02"},
  {"power_flags", "integer", "23.02", "23.11"},
  {"preempt_time", "integer", "23.02"},
  {"preemptable_time", "integer", "23.02"},
  {"pre_sus_time", "integer", "23.02"},
  {"priority", "integer", "23.02"},
  {"profile", "integer", "23.02"},
  {"qos", "string", "23.02"},
  {"reboot", "integer", "23.02"},
  {"req_nodes", "string", "23.02"},
  {"req_switch", "integer", "23.02"},
  {"requeue", "integer", "23.02"},
  {"resize_time", "integer", "23.02"},
  {"restart_cnt", "integer", "23.02"},
  {"resv_name", "string", "23.02"},
  {"sched_nodes", "string", "23.02"},
  {"selinux_context", "string", "23.02"},
  {"shared", "integer", "23.02", "25.11"},
  {"show_flags", "integer", "23.02", "24.05"},
  {"site_factor", "integer", "23.02"},
  {"sockets_per_board", "integer", "23.02"},
  {"sockets_per_node", "integer", "23.02"},
  {"start_time", "integer", "23.02"},
  {"start_protocol_ver", "integer", "23.02"},
  {"state_desc", "string", "23.02"},
  {"state_reason", "integer", "23.02"},
  {"std_err", "string", "23.02"},
  {"std_in", "string", "23.02"},
  {"std_out", "string", "23.02"},
  {"submit_time", "integer", "23.02"},
  {"suspend_time", "integer", "23.02"},
  {"system_comment", "string", "23.02"},
  {"time_limit", "integer", "23.02"},
  {"time_min", "integer", "23.02"},
  {"threads_per_core", "integer", "23.02"},
  {"tres_bind", "string", "23.02"},
  {"tres_freq", "string", "23.02"},
  {"tres_per_job", "string", "23.02"},
  {"tres_per_node", "string", "23.02"},
  {"tres_per_socket", "string", "23.02"},
  {"tres_per_task", "string", "23.02"},
  {"tres_req_str", "string", "23.02"},
  {"tres_alloc_str", "string", "23.02"},
  {"user_id", "integer", "23.02"},
  {"user_name", "string", "23.02"},
  {"wait4switch", "integer", "23.02"},
  {"wckey", "string", "23.02"},
  {"work_dir", "string", "23.02"},
  {"container_type", "string", "26.05"},
  {"exclusive", "integer", "26.05"},
  {"oversubscribe", "integer", "26.05"},
}

-- As a site's script writes a job into its log: a number that is nil, or no whole one, fails the call.
local FORMATS = {string = "%s", integer = "%d", number = "%.0f", table = "%s"}

-- Before Lua 5.3 there are no integers: a number may be either.
local function is_of(value, kind)
  if not math.type and kind == "integer" then return type(value) == "number" and value % 1 == 0 end
  return (math.type and math.type(value) == "integer" and "integer" or type(value)) == kind
end

local function read(operation, info)
  local file = io.open(os.getenv("SITE_LOG"), "a")
  for _, field in ipairs(FIELDS) do
    local name, kind = field[1], field[2]
    local value = info[name]
    local optional = kind == "string" or kind == "table" or name == "min_mem_per_node" or name == "min_mem_per_cpu"
    if value == nil and not optional then return slurm.ERROR, name .. " is nil" end
    if value ~= nil and not is_of(value, kind) then return slurm.ERROR, name .. " is no " .. kind end
    file:write(operation, " ", name, "=", value == nil and "nil" or string.format(FORMATS[kind], value), "\n")
  end
  file:close()
  local code, text = slurm.job_info_to_string(info)
  if code ~= slurm.SUCCESS or not text:find("^JobId=" .. info.job_id .. " ") then return slurm.ERROR, text end
  if next(info) ~= nil then return slurm.ERROR, "the table has fields of its own" end
  if info.no_such_field ~= nil then return slurm.ERROR, "a field that does not exist is not nil" end
  slurm.log_info("JobId=%u state=%u nodes=%s\n%s", info.job_id, info.job_state, info.nodes, text)
  return slurm.SUCCESS
end

function slurm_bb_job_process(script, uid, gid, info) return read("process", info) end
function slurm_bb_pools() return slurm.SUCCESS, '{"pools": [{"id": "fast", "quantity": 5, "granularity": 1048576}]}' end
function slurm_bb_job_teardown(job, script, hurry, uid, gid) return slurm.SUCCESS end
function slurm_bb_setup(job, uid, gid, pool, size, script, info) return read("setup", info) end
function slurm_bb_data_in(job, script, uid, gid, info) return read("data_in", info) end
function slurm_bb_test_data_in(job, script, uid, gid, info) return read("test_data_in", info) end
function slurm_bb_real_size(job, uid, gid, info) return read("real_size", info) end
function slurm_bb_paths(job, script, path_file, uid, gid, info) return read("paths", info) end
function slurm_bb_pre_run(job, script, uid, gid, info) return read("pre_run", info) end
function slurm_bb_post_run(job, script, uid, gid, info) return read("post_run", info) end
function slurm_bb_data_out(job, script, uid, gid, info) return read("data_out", info) end
function slurm_bb_test_data_out(job, script, uid, gid, info) return read("test_data_out", info) end
function slurm_bb_get_status(uid, gid, ...) return slurm.SUCCESS, table.concat({...}, " ") end
