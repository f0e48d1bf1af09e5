#!/usr/bin/env bash
# Makes an environment of its own for a rival of scripts/bench/compare.py, from the package registry:
#     scripts/bench/rivals/install.sh trl|verl DIR
# Run again, it returns at once unless this file or verl's list has changed. PYTHON=/path/to/python3 chooses the interpreter.
set -euo pipefail

rival=${1:-}
folder=${2:-}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! $rival =~ ^(trl|verl)$ || -z $folder ]]; then
  echo "usage: scripts/bench/rivals/install.sh trl|verl DIR" >&2
  exit 2
fi
done=$folder/installed-$rival-$(cat "$here/install.sh" "$here/verl_requirements.txt" | sha256sum | cut -c1-16)
[ ! -e "$done" ] || exit 0

torch_index=(--extra-index-url https://download.pytorch.org/whl/cpu)
curl --silent --fail --max-time 4 --head "${torch_index[1]}/torch/" >/dev/null || torch_index=() # elsewhere pip knows a mirror
"${PYTHON:-python3}" -m venv "$folder"
install=("$folder/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off --quiet)
case "$rival" in
  trl) "${install[@]}" "${torch_index[@]}" trl==1.16.0 torch==2.13.0 transformers==5.19.0 ;;
  verl) "${install[@]}" "${torch_index[@]}" --no-deps --requirement "$here/verl_requirements.txt" ;;
esac
: >"$done"
