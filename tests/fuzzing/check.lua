-- Asks the check of burst_buffer.lua about many scripts in one process: `lua check.lua RUN site.json < cases`.
-- A case is its length in bytes, a line break and the bytes; an answer is one line, empty where it may be submitted.
slurm = { SUCCESS = 0, ERROR = -1 }
local slurmctld = assert(loadfile(arg[1] .. "/lua/slurmctld.lua"))(arg[1])
local file = io.open(arg[2], "rb")
local site = slurmctld.read_json(file:read("*a"))
assert(site, "the tables cannot be read")
local check = slurmctld.make_check(site, true)
while true do
  local length = io.read("*l")
  if not length then break end
  length = tonumber(length)
  local why = check(length > 0 and io.read(length) or "", site) or ""
  io.write((why:gsub("[%c]", " ")), "\n")
end
