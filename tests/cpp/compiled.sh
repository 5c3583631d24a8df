#!/bin/sh
# Compiles a source, unless the same compiler has compiled the same text with the same flags: then
# its object is taken from KEPT, whatever the files' times say. Writes the dependencies for make.
#   compiled.sh KEPT OBJECT COMPILER ARGUMENTS... SOURCE
set -eu
kept=$1 object=$2
shift 2
mkdir -p "$kept" "$(dirname "$object")"
text=$object.ii
trap 'rm -f "$text"' EXIT
"$@" -E -MMD -MP -MF "${object%.o}.d" -MT "$object" -o "$text"
same=$kept/$({ "$1" --version; echo "$@"; cat "$text"; } | sha256sum | cut -c1-32).o
if [ ! -f "$same" ]; then
  "$@" -c -o "$object"
  cp "$object" "$same.$$" && mv "$same.$$" "$same"
else
  cp "$same" "$object"
fi
