-- Check of burst-buffer requests for `job_process`, so that `sbatch` rejects invalid ones before a job exists. This chunk
-- returns the check as a function.
--
-- It implements the grammar of replica/grammar/slurm.py, and accepts everything that Forebay accepts.
-- tests/cluster/slurm/test_lua_grammar.py and the fuzzer compare the two.

local SCRIPT_BYTES_MAX, integer, is_among = ...
local SHOWN_BYTES = 48 -- longest part of a user's text that an error message repeats

local function quote(text)
  if #text > SHOWN_BYTES then
    text = text:sub(1, SHOWN_BYTES):gsub("[\194-\244][\128-\191]*$", "") .. "..."
  end
  return "'" .. text:gsub("%c", "?") .. "'"
end

-- Return the length in bytes of the character at an offset if Python regards it as white space, otherwise nil.
local function blank_at(text, at)
  local a, b, c = text:byte(at, at + 2)
  if not a then return nil end
  if a == 32 or (a >= 9 and a <= 13) or (a >= 28 and a <= 31) then return 1 end
  if a == 0xC2 and (b == 0x85 or b == 0xA0) then return 2 end
  if a == 0xE1 and b == 0x9A and c == 0x80 then return 3 end
  if a == 0xE2 and b == 0x80 and c and ((c >= 0x80 and c <= 0x8A) or c == 0xA8 or c == 0xA9 or c == 0xAF) then return 3 end
  if a == 0xE2 and b == 0x81 and c == 0x9F then return 3 end
  if a == 0xE3 and b == 0x80 and c == 0x80 then return 3 end
  return nil
end

local function head_of(line)
  if line:sub(1, 1) ~= "#" then return "" end
  local at = 1
  while true do
    at = line:find("[%c \194\225\226\227]", at)
    if not at then return line end
    if blank_at(line, at) then return line:sub(1, at - 1) end
    at = at + 1
  end
end

local function is_blank(line)
  local at = 1
  while at <= #line do
    local length = blank_at(line, at)
    if not length then return false end
    at = at + length
  end
  return true
end

-- Return the offset (from 1) of the first character that a directive must not contain, or nil.
local function control_at(line)
  local at = 1
  while true do
    at = line:find("[%z\1-\8\10-\31\127\194\216\226\237]", at)
    if not at then return nil end
    local a, b, c = line:byte(at, at + 2)
    if a < 128 then return at end
    if a == 0xC2 and b and b >= 0x80 and b <= 0x9F then return at end
    if a == 0xD8 and b == 0x9C then return at end
    if a == 0xE2 and b == 0x80 and c and (c == 0x8E or c == 0x8F or (c >= 0xA8 and c <= 0xAE)) then return at end
    if a == 0xE2 and b == 0x81 and c and c >= 0xA6 and c <= 0xA9 then return at end
    if a == 0xED and b and b >= 0xA0 and b <= 0xBF then return at end
    at = at + 1
  end
end

local function characters(text)
  local _, continued = text:gsub("[\128-\191]", "")
  return #text - continued
end

-- Return a text without trailing bytes of a set. (Lua tries a pattern that ends in $ at every byte of the text, which
-- would take quadratic time.)
local function trimmed(text, bytes)
  local last = #text
  while last > 0 and bytes[text:byte(last)] do last = last - 1 end
  return text:sub(1, last)
end

local BLANKS, BACKSLASHES = { [32] = true, [9] = true }, { [92] = true }

-- Return whether a text ends in an odd number of backslashes.
local function ends_open(text) return (#text - #trimmed(text, BACKSLASHES)) % 2 == 1 end

-- Raise the error for a word. A word has its text, line number, whole line, and offset in the line (bytes, from 1).
local function refuse(word, sentence, remedy, bytes)
  local column = characters(word.whole:sub(1, word.at - 1)) + characters(word.text:sub(1, bytes or 0)) + 1
  error({ sentence = string.format("script line %d, column %d: %s; %s", word.line, column, sentence, remedy) }, 0)
end

local function words_of(body, from, number, into)
  local at = from
  while true do
    local first, last = body:find("[^ \t]+", at)
    if not first then return end
    into[#into + 1] = {
      text = body:sub(first, last), line = number, whole = body, at = first, tab = body:sub(last + 1, last + 1) == "\t",
    }
    at = last + 1
  end
end

local function find_directives(text, site)
  local kind, found, open, number, at, count = "#" .. site.directive, {}, nil, 0, 1, 0
  while at <= #text + 1 do
    local stop = text:find("\n", at, true) or #text + 1
    local line = text:sub(at, stop - 1)
    at, number = stop + 1, number + 1
    if line:sub(-1) == "\r" then line = line:sub(1, -2) end
    local head = head_of(line)
    local here = { text = head, line = number, whole = line, at = 1 }
    local read = true
    if open then
      if head ~= kind then
        refuse(open.backslash, "the line after a continuation does not start with " .. kind,
          "start line " .. number .. " with " .. kind .. ", or remove the backslash")
      end
    elseif head ~= kind then
      if head == "" and not is_blank(line) then break end
      if head:sub(1, #kind) == kind and head:sub(1, 2) ~= "#!" and head:sub(1, 7) ~= "#SBATCH" then
        refuse(here, "Slurm reads " .. quote(head) .. " as " .. kind, "write " .. kind .. " and a blank, or another word")
      end
      read = false
    end
    if read then
      local bad = control_at(line)
      if bad then
        refuse({ text = line, line = number, whole = line, at = bad }, "the directive holds a character that cannot be shown",
          "remove it, or retype the line")
      end
      local _, more = line:sub(#kind + 1):gsub("[^ \t]+", "", site.limits.words)
      count = count + 1 + more
      if count > site.limits.words then
        refuse(here, "the directives have more than " .. integer(site.limits.words) .. " words",
          "stage a directory instead of its files, and write comments into other lines")
      end
      local body, backslash = trimmed(line, BLANKS), nil
      if ends_open(body) then
        backslash = { text = "\\", line = number, whole = body, at = #body }
        body = trimmed(body:sub(1, -2), BLANKS)
      end
      local each = open or { at = here, words = {} }
      words_of(body, #kind + 1, number, each.words)
      if backslash then
        each.backslash, open = backslash, each
      else
        local last = each.words[#each.words]
        if last and ends_open(last.text) then
          refuse(last, "the directive ends in a backslash, after which nothing comes", "remove the backslash")
        end
        found[#found + 1], open = each, nil
        if #found > site.limits.directives then
          refuse(each.at, "there are more than " .. integer(site.limits.directives) .. " directives",
            "stage a directory instead of its files")
        end
      end
    end
  end
  if open then refuse(open.backslash, "the last directive ends in a continuation", "remove the backslash") end
  return found
end

local function starts(text, with) return text:sub(1, #with) == with end

-- Check pool= and capacity= as Slurm finds them: at the first occurrence of these letters in a line.
local function check_counted(each)
  local words = each.words
  local asks = words[1] and (words[1].text == "jobdw" or words[1].text:find("=", 1, true))
  local comment = #words + 1
  for index = #words, 1, -1 do
    if starts(words[index].text, "#") then comment = index end
  end
  for _, key in ipairs({ "pool=", "capacity=" }) do
    for index, word in ipairs(words) do
      local stands = word.text:find(key, 1, true)
      if stands then
        if not (asks and index < comment and stands == 1) then
          refuse(word, "Slurm reads the letters " .. key .. " in " .. quote(word.text) .. " as a request of the job",
            "write " .. key .. " once, as an option of the capacity request, and nowhere else", stands - 1)
        end
        break
      end
    end
  end
  for _, word in ipairs(words) do
    local key = word.tab and (word.text:match("^(pool=)") or word.text:match("^(capacity=)"))
    if key then
      for _, first in ipairs(words) do
        if starts(first.text, key) then
          refuse(first, "Slurm reads the tab after this word as a part of it", "write a blank", #first.text)
        end
      end
    end
  end
end

local function without_comment(words)
  for index, word in ipairs(words) do
    if starts(word.text, "#") then
      if words[#words].line ~= word.line then
        refuse(word, "the directive goes on after the line of this comment", "move the comment to the end of its last line")
      end
      local before = {}
      for place = 1, index - 1 do before[place] = words[place] end
      return before
    end
  end
  return words
end

local function listed(values, between) return table.concat(values, between or ", ") end

local function read_options(words, from, keys)
  local found, is_literal = {}, false
  for index = from, #words do
    local word = words[index]
    local key, text = word.text:match("^([^=]*)=(.*)$")
    if ends_open(word.text) then
      refuse(word, quote(word.text) .. " ends in a backslash that continues nothing",
        "remove it, or end the line with it", #word.text - 1)
    end
    if not key or key == "" then
      refuse(word, quote(word.text) .. " is not an option", "write " .. listed(keys, "= ") .. "=")
    end
    if is_among(key, keys) then
      if found[key] then refuse(word, key .. "= is written twice", "write it once") end
      if text == "" then refuse(word, key .. "= is empty", "write a value after " .. key .. "=", #key + 1) end
      found[key] = { word = word, text = text, offset = #key + 1, is_literal = is_literal }
    end
    is_literal = is_literal or word.text:find("\\\\", 1, true) ~= nil
  end
  return found
end

local function refuse_value(value, sentence, remedy, bytes)
  refuse(value.word, sentence, remedy, value.offset + (bytes or 0))
end

local function read_capacity(value, site)
  local text, example = value.text, "write a number and a suffix, for example 10GiB"
  local shown = "the size " .. quote(text)
  if text:find("^[+-]") then refuse_value(value, shown .. " has a sign", "write a positive number without a sign, for example 10GiB") end
  local whole = text:match("^[0-9]+")
  if not whole then refuse_value(value, shown .. " does not start with a number", "write a number, for example 10GiB") end
  local rest = text:sub(#whole + 1)
  local decimals = rest:match("^%.([0-9]+)")
  local after = #whole + (decimals and #decimals + 1 or 0)
  local suffix = text:sub(after + 1):match("^[A-Za-z]*")
  if after + #suffix < #text then
    refuse_value(value, shown .. " has an unexpected character", example, after + #suffix)
  end
  local upper = suffix:upper()
  if is_among(upper, site.node_suffixes) then
    if decimals then refuse_value(value, shown .. " asks for a part of a node", "write a whole number of nodes", #whole) end
    if not tonumber(whole) or tonumber(whole) == 0 then refuse_value(value, shown .. " is zero", "ask for at least one byte") end
    return { nodes = true }
  end
  local multiplier = site.suffixes[upper]
  if not multiplier then
    refuse_value(value, shown .. " has an unknown suffix", "use one of " .. site.suffixes_listed, after)
  end
  local digits = whole .. (decimals or "")
  if #digits > site.limits.digits then
    refuse_value(value, shown .. " has more than " .. integer(site.limits.digits) .. " digits", "ask for less")
  end
  if not digits:find("[1-9]") then refuse_value(value, shown .. " is zero", "ask for at least one byte") end
  local bytes = tonumber(whole .. "." .. (decimals or "0")) * multiplier
  -- A double is not exact here, so a size slightly above the limit is accepted and left to Forebay.
  if bytes > site.limits.bytes * 1.000001 then refuse_value(value, shown .. " overflows", "ask for less") end
  return { bytes = bytes, point = decimals and #whole }
end

local function check_name(value, site)
  local text = value.text
  if characters(text) > site.limits.name or not text:find("^[A-Za-z0-9_][A-Za-z0-9_.+-]*$") then
    refuse_value(value, "the pool name " .. quote(text) .. " is none", "write the name of a pool")
  end
end

local function read_access(value, site)
  local text, at, modes = value.text, 1, {}
  while true do
    local part = text:match("^[^(),]*", at)
    local after = at + #part
    local options = text:match("^%(([^()]*)%)", after)
    local stop = after + (options and #options + 2 or 0)
    local ends = text:sub(stop, stop)
    if ends ~= "" and ends ~= "," then
      refuse_value(value, "the options of an access mode are not between one ( and one )",
        "write them as striped(client_cache=yes)", at - 1)
    end
    if options == "" then refuse_value(value, "the access mode " .. quote(part) .. " has empty options", "remove ()", at - 1 + #part) end
    if not is_among(part, site.access_modes) then
      refuse_value(value, "unknown access mode " .. quote(part),
        "use " .. listed(site.access_modes) .. ", separated by commas", at - 1)
    end
    if modes[part] then refuse_value(value, "access mode " .. quote(part) .. " is written twice", "write it once", at - 1) end
    modes[part] = true
    if ends == "" then return modes end
    at = stop + 1
  end
end

local function read_space(at, options, asked, site)
  if asked.space then
    refuse(at, "capacity is asked for a second time", "write one request for the whole job")
  end
  asked.space = at
  if not options.capacity then refuse(at, "the request has no capacity", "add capacity=, for example capacity=10GiB") end
  asked.capacity, asked.size = options.capacity, read_capacity(options.capacity, site)
  if options.pool then
    check_name(options.pool, site)
    asked.pool = options.pool
  end
  if options.type and not is_among(options.type.text, site.types) then
    refuse_value(options.type, "the type " .. quote(options.type.text) .. " is not known here", "write type=" .. site.types[1])
  end
  if options.access_mode then
    asked.access, asked.modes = options.access_mode, read_access(options.access_mode, site)
  end
end

-- Return the fault of an absolute path as words that follow `the path `, or nil.
local function path_fault(path, site)
  if not starts(path, "/") then return quote(path) .. " is not absolute" end
  if #path > site.limits.path then return "is longer than " .. integer(site.limits.path) .. " bytes" end
  if ("/" .. path .. "/"):find("/../", 1, true) then return quote(path) .. " goes up with .." end
  return nil
end

local function literal(text) return starts(text, "\\\\") and text:sub(3) or text end

-- The value of the variable at byte `at` of a path, and the byte after the variable; nil if none is there.
local function value_at(value, text, at, site)
  local last, name = select(2, text:find("^%${([A-Za-z_][A-Za-z0-9_]*)}", at))
  if not name then last, name = select(2, text:find("^%$([A-Za-z_][A-Za-z0-9_]*)", at)) end
  if not name then
    if text:sub(at + 1, at + 1) == "{" then
      refuse_value(value, quote(text:sub(at)) .. " is not a variable", "write for example ${USER}", at - 1)
    end
    return nil
  end
  if starts(name, "DW_") or starts(name, site.whole_buffer) then
    refuse_value(value, "$" .. name:sub(1, SHOWN_BYTES) .. " is a path in a buffer, and cannot be used here",
      "write a path outside the buffers", at - 1)
  end
  local known = site.path_variables[name]
  if known == nil then
    local names = {}
    for one in pairs(site.path_variables) do names[#names + 1] = "$" .. one end
    table.sort(names)
    refuse_value(value, "the variable $" .. name:sub(1, SHOWN_BYTES) .. " is not permitted in paths on this cluster",
      "use one of " .. listed(names), at - 1)
  end
  if not known then
    refuse_value(value, "$" .. name .. " is taken from the environment of a submit, which Slurm does not pass on",
      "write the path itself, or ask an operator to set PathVariables=" .. name .. "=/DIRECTORY/%u", at - 1)
  end
  if at == 1 and not starts(known, "/") then
    refuse_value(value, "$" .. name .. " is not an absolute path", "write ./$" .. name .. " for a path in the working directory")
  end
  return known, last + 1
end

-- The first byte of the first part of a path with a pattern; nil if it has none.
local function pattern_of(value)
  if value.is_literal then return nil end
  local stop, at = value.text:find("\\\\", 1, true), 1
  local text = value.text:sub(1, stop and stop - 1)
  while at <= #text do
    local part = text:match("^[^/]*", at)
    local first = part:find("[", 1, true)
    if part:find("[*?]") or first and #(part:match("^.*%]") or "") > first + 1 then return at end
    at = at + #part + 1
  end
  return nil
end

-- The path of an option up to byte `last`, with its variables replaced from byte `from` on.
local function expand(value, from, last, site)
  if value.is_literal then return starts(value.text, "\\\\") and value.text or "\\\\" .. value.text end
  local whole = value.text:sub(1, last)
  local stop = whole:find("\\\\", 1, true)
  local text, pieces, after = whole:sub(1, stop and stop - 1), {}, 1
  local at = text:find("$", from, true)
  while at do
    local known, following = value_at(value, text, at, site)
    if known then
      pieces[#pieces + 1] = text:sub(after, at - 1) .. known
      after = following
    end
    at = text:find("$", known and following or at + 1, true)
  end
  return listed(pieces, "") .. whole:sub(after)
end

-- The path of an option outside the buffers: absolute, or beginning with %d, the working directory.
local function read_outside(value, site, last)
  local path = expand(value, 1, last, site)
  local is_below = path == "%d" or starts(path, "%d/")
  if not is_below and not starts(literal(path), "/") then
    local written = last and value.text or path
    if starts(written, "%d") then
      refuse_value(value, "the path " .. quote(written) .. " continues %d without a slash", "write %d/ before the rest")
    end
    if starts(written, "~") then refuse_value(value, "the path starts with ~, which is not replaced", "write the path itself") end
    while starts(path, "./") do path = path:sub(3):gsub("^/+", "") end
    path, is_below = "%d/" .. (path == "." and "" or path), true
  end
  local fault = path_fault(is_below and "/" .. path or literal(path), site)
  if fault then
    refuse_value(value, "the path " .. fault, "write an absolute path, or one in the working directory, without ..")
  end
  return path
end

local function variable_of(path)
  local head = path:match("^[^/]*")
  if not starts(head, "$") then return nil end
  return head:match("^%${(.*)}$") or head:sub(2), path:sub(#head + 2)
end

local function is_persistent(name, site)
  return starts(name, site.persistent_prefix) and #name > #site.persistent_prefix
end

local function read_inside(value, site, is_file, last)
  local whole = expand(value, #value.text:match("^[^/]*") + 1, last, site)
  local path = literal(whole)
  local name, rest = variable_of(path)
  if not name or not (is_among(name, site.variables) or is_persistent(name, site)) then
    refuse_value(value, quote(path) .. " is not on the buffer", "start it with one of $" .. listed(site.variables, ", $"))
  end
  local fault = path_fault("/" .. rest, site)
  if fault then refuse_value(value, "the path " .. fault, "write a path below the variable, without ..") end
  if rest:find("[^/]") then return whole end
  if is_file then
    refuse_value(value, quote(path) .. " is the root of the buffer, not a file", "add the file's name, or write type=directory")
  end
  if name == site.whole_buffer then
    refuse_value(value, quote(path) .. " also holds directories of Forebay", "write $DW_JOB_STRIPED for the root of the buffer")
  end
  return whole
end

-- Check the pattern of a path, which begins at byte `first`.
local function read_pattern(value, first, site)
  local stop = value.text:find("\\\\", first, true)
  local tail = stop and value.text:sub(stop + 2) or ""
  local text = expand({ word = value.word, offset = value.offset, text = value.text:sub(1, stop and stop - 1) }, first, nil, site)
  text = text:sub(first) .. tail
  if first == 1 and starts(text, "/") then
    refuse_value(value, "the pattern begins in the value of a variable", "write a slash before it", first - 1)
  end
  if value.text:sub(first, stop and stop - 1):find("**", 1, true) then
    refuse_value(value, "** is not supported: a pattern does not descend", "write * for each level, or type=directory", first - 1)
  end
  local fault = path_fault("/" .. text, site)
  if fault then refuse_value(value, "the pattern " .. fault, "write a path below the directory, without ..") end
end

-- The kind of a transfer that its destinations are compared by. A directory that ends in a slash may get a file.
local function kind_of(kind, stage, destination)
  if kind ~= "either" then return kind end
  return stage == "stage_out" and destination:sub(-1) == "/" and "list" or "directory"
end

local function read_stage(words, asked, site)
  local verb, stage = words[1], words[1].text
  local becomes = site.copies[stage] -- what Rabbit's copy_in and copy_out are here
  local options = read_options(words, 2, becomes and site.copy_keys or site.stage_keys)
  for _, key in ipairs(becomes and { "source", "destination" } or { "type", "source", "destination" }) do
    if not options[key] then
      refuse(verb, stage .. " has no " .. key .. "=", "write " .. stage .. " source=… destination=…")
    end
  end
  local kind = becomes and "either" or options.type.text
  if not becomes and not is_among(kind, site.transfer_types) then
    refuse_value(options.type, "the type of " .. stage .. " is " .. quote(kind), "write type=" .. listed(site.transfer_types, ", type="))
  end
  local inside, source, destination
  local first = pattern_of(options.source)
  if becomes and first then
    refuse_value(options.source, "the source of " .. stage .. " is a pattern", "write " .. becomes .. " type=file", first - 1)
  end
  stage = becomes or stage
  if kind == "list" then
    if first then
      refuse_value(options.source, "the path of a list is a pattern, but one file holds the list",
        "write type=file to stage what matches", first - 1)
    end
    source = read_outside(options.source, site)
    if stage == "stage_out" then
      destination = read_outside(options.destination, site)
    else
      destination = read_inside(options.destination, site)
      inside = options.destination
    end
  elseif stage == "stage_in" then
    inside = options.destination
    source = read_outside(options.source, site, first and first - 1)
    destination = read_inside(inside, site)
  else
    inside = options.source
    destination = read_outside(options.destination, site)
    source = read_inside(inside, site, kind == "file" and not first, first and first - 1)
  end
  if first then read_pattern(options.source, first, site) end
  asked.count[stage] = (asked.count[stage] or 0) + 1
  if asked.count[stage] > site.limits.transfers then
    refuse(verb, "there are more than " .. integer(site.limits.transfers) .. " " .. stage .. " directives",
      "stage a directory instead of its files")
  end
  if inside then
    local among = kind == "list" and asked.lists or asked.moves[stage]
    among[#among + 1] = inside
  end
  if kind ~= "list" or stage == "stage_out" then
    local outside = stage == "stage_in" and options.source or options.destination
    asked.copies[#asked.copies + 1] = {
      outgoing = stage == "stage_out", kind = first and "list" or kind_of(kind, stage, destination), source = source, destination = destination,
      at = kind == "list" and options.source.word or outside.word, is_listed = kind == "list",
    }
  end
  for _, key in ipairs(site.choice_keys) do
    local value = options[key]
    if value then
      if not is_among(value.text, site.choices[key]) then
        refuse_value(value, key .. "=" .. value.text:sub(1, SHOWN_BYTES) .. " says nothing", "use one of " .. listed(site.choices[key]))
      end
      if key == "move" and stage == "stage_in" and value.text == "yes" then
        refuse_value(value, "move=yes would leave the buffer, which goes with its job, with the only copy",
          "leave it out: only a stage_out moves")
      end
    end
  end
  if options.links and options.links.text == "follow" then
    if options.move and options.move.text == "yes" then
      refuse_value(options.links, "links=follow and move=yes: what a link leads to is not this transfer's to remove",
        "leave out one of them")
    end
    if options.backend and options.backend.text ~= "native" then
      refuse_value(options.links, "links=follow needs Forebay's own mover", "leave out backend=")
    end
  end
end

local function check_access(value, asked, site)
  local name = variable_of(literal(value.text))
  if is_persistent(name, site) then
    refuse(value.word, "the job does not use a persistent buffer", "write a path below $" .. site.variables[1])
  end
  local mode = site.variable_modes[name]
  if mode and not asked.modes[mode] then
    refuse(value.word, "$" .. name .. " needs access_mode=" .. mode, "add " .. mode .. " to access_mode=")
  end
end

-- ---- transfers that may write the same file, as in replica/grammar/destinations.py

local function parts_of(path, site)
  local parts, name, rest = {}, variable_of(path)
  if name then
    local directory = site.variable_directories[name]
    parts, path = directory and { site.whole_buffer, directory } or { name }, rest
  end
  for part in path:gmatch("[^/]+") do
    if part ~= "." then parts[#parts + 1] = part end
  end
  return parts
end

-- Add to `copy` the parts of its destination, and both paths as text; return false for paths with a backslash, which
-- escapes symbols. `setup` checks such paths.
local function is_known(copy, site)
  if (copy.source .. copy.destination):find("\\", 1, true) then return false end
  local from = parts_of(copy.source, site)
  copy.to, copy.from = parts_of(copy.destination, site), "/" .. listed(from, "/")
  local _, rest = variable_of(copy.destination)
  if copy.kind == "file" and (copy.destination:sub(-1) == "/" or rest and not rest:find("[^/]")) then
    copy.to[#copy.to + 1] = from[#from]
  end
  copy.path = "/" .. listed(copy.to, "/")
  return true
end

-- Return whether two sources certainly differ. A path with a symbol such as %j may equal any other path.
local function differ(one, other) return one ~= other and not (one .. other):find("%", 1, true) end

-- Return whether two transfers may write the same file with different contents. The destination of `upper` equals or
-- contains that of `lower`.
local function overlap(upper, lower)
  local is_same = upper.path == lower.path
  if upper.kind == "file" and lower.kind == "file" then return is_same and differ(upper.from, lower.from) end
  if not upper.outgoing or (upper.kind == "list" and lower.kind == "list") then return false end
  if is_same and (upper.kind == "file" or upper.kind == "list" and lower.kind == "directory") then
    upper, lower = lower, upper
  end
  if upper.kind == "file" then return false end
  if upper.kind == "list" then return is_same end
  return lower.kind == "list" or differ(lower.from, upper.from .. lower.path:sub(#upper.path + 1))
end

local function check_overlaps(copies, site)
  local at = { [true] = {}, [false] = {} }
  local known = {}
  for number, copy in ipairs(copies) do
    copy.number = copy.is_listed and number + #copies or number -- Forebay processes lists after the others
    if is_known(copy, site) then known[#known + 1] = copy end
  end
  -- Sort directories before their contents.
  table.sort(known, function(one, other)
    if #one.to ~= #other.to then return #one.to < #other.to end
    return one.number < other.number
  end)
  for _, copy in ipairs(known) do
    local path, above = "", at[copy.outgoing]
    for _, part in ipairs(copy.to) do
      path = path .. "/" .. part
      for _, upper in ipairs(above[path] or {}) do
        if overlap(upper, copy) then
          local earlier, later = upper, copy
          if later.number < earlier.number then earlier, later = later, earlier end
          refuse(later.at, "the destination " .. quote(later.destination) .. " overlaps " .. quote(earlier.destination)
            .. " of another directive, so one would replace files of the other", "give each directive its own destination")
        end
      end
    end
    above[copy.path] = above[copy.path] or {}
    table.insert(above[copy.path], copy)
  end
end

local function check_whole(found, asked, site)
  if not asked.space then
    refuse(found[1].at, "the job requests no capacity", "add for example #" .. site.directive .. " pool=fast capacity=10GiB")
  end
  local at = asked.capacity
  if asked.size.nodes then
    refuse_value(at, "a capacity in nodes is not possible, because the nodes of the job are not known yet",
      "write a size, for example capacity=10GiB")
  end
  if asked.size.point then
    refuse_value(at, "Slurm reads " .. quote(at.text) .. " as the integer before its decimal point",
      "write a whole number with a smaller unit, for example 1536MiB", asked.size.point)
  end
  if not asked.pool then
    refuse(at.word, "capacity= needs pool=: Slurm counts by the pool that the line names", "add pool= to this line")
  end
  if asked.modes.private then
    refuse_value(asked.access, "access_mode=private is not possible, because the nodes of the job are not known yet",
      "use access_mode=striped")
  end
  for _, moves in ipairs({ asked.moves.stage_in, asked.moves.stage_out, asked.lists }) do
    for _, value in ipairs(moves) do check_access(value, asked, site) end
  end
  check_overlaps(asked.copies, site)
end

local function size_text(bytes, site)
  for _, unit in ipairs(site.units) do
    if bytes >= unit[2] and bytes % unit[2] == 0 then return integer(bytes / unit[2]) .. unit[1] end
  end
  return integer(bytes)
end

local function check_pool(asked, site)
  local pool, names = nil, {}
  for _, one in ipairs(site.pools) do
    names[#names + 1] = one.id
    if one.id == asked.pool.text then pool = one end
  end
  if not pool then
    refuse(asked.pool.word, "pool " .. quote(asked.pool.text) .. " does not exist",
      #names > 0 and "use one of: " .. listed(names) or "this cluster has none yet: ask its operator")
  end
  local most = pool.quantity * pool.granularity
  if most == 0 then
    refuse(asked.pool.word, "pool " .. pool.id .. " is out of service", "use another pool, or submit without a buffer")
  end
  if asked.size.bytes > most then
    refuse(asked.capacity.word, quote(asked.capacity.text) .. " exceeds the capacity of pool " .. pool.id .. ", "
      .. size_text(most, site), "request less")
  end
end

-- Return nil if a script may be submitted, otherwise the error with its place. `site` is the content of site.json.
return function(text, site)
  local fine, why = pcall(function()
    if #text > SCRIPT_BYTES_MAX then
      error({ sentence = "the script has more than " .. integer(SCRIPT_BYTES_MAX) .. " bytes; put its data into files" }, 0)
    end
    local asked = { modes = { striped = true }, moves = { stage_in = {}, stage_out = {} }, lists = {}, copies = {}, count = {} }
    local found = find_directives(text, site)
    for _, each in ipairs(found) do
      check_counted(each)
      local words = without_comment(each.words)
      local verb = words[1]
      if not verb then
        refuse(each.at, "#" .. site.directive .. " is followed by nothing",
          "write for example #" .. site.directive .. " pool=fast capacity=10GiB")
      end
      if verb.text:find("=", 1, true) then
        read_space(verb, read_options(words, 1, site.space_keys), asked, site)
      elseif verb.text == "jobdw" then
        read_space(verb, read_options(words, 2, site.space_keys), asked, site)
      elseif is_among(verb.text, site.verbs) then
        read_stage(words, asked, site)
      else
        refuse(verb, "unknown directive " .. quote(verb.text) .. " of #" .. site.directive, "use one of " .. listed(site.verbs))
      end
    end
    if #found == 0 then return end
    check_whole(found, asked, site)
    check_pool(asked, site)
  end)
  if fine then return nil end
  if type(why) == "table" then return why.sentence end
  error(why, 0)
end
