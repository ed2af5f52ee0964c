# Sourced by the scripts, before they set anything up, with the module that they run and their own arguments. Ends the
# script with the help for --help, and with exit code 2 for an option that the usage at its head does not name.
# usage: . tests/repo/options.sh MODULE "$@"
forebay_usage=$(sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0")
for forebay_word in "${@:2}"; do
  case $forebay_word in
    -h | --help)
      forebay_tree=$(dirname "${BASH_SOURCE[0]}")/../..
      # The module needs packages. Before the first set-up there are none, and the head of the script has to do.
      PYTHONPATH=$forebay_tree "$forebay_tree/.venv/bin/python" -m "$@" 2>/dev/null || printf '%s\n' "$forebay_usage"
      exit 0 ;;
    --) break ;;
    --?*)
      # argparse takes an option's beginning for the option.
      [[ $forebay_usage != *[^-a-zA-Z0-9]"${forebay_word%%=*}"* ]] || continue
      printf 'scripts/%s: unknown option %s; try --help\n' "${0##*/}" "$forebay_word" >&2
      exit 2 ;;
  esac
done
unset forebay_usage forebay_word
