#!/bin/sh
# Unpacks Debian's package libonnxruntime-dev under $1, without installing it. On a Debian older than the package, it is
# fetched from the suite that has it, from the machine's mirror, with package lists of its own: the machine's lists do not
# change.
set -eu
out=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
if apt-cache policy libonnxruntime-dev 2>/dev/null | grep -q 'Candidate: [0-9]'; then
  apt-get -qq download libonnxruntime-dev
else
  mirror=$(sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/debian.sources 2>/dev/null | head -1)
  [ -n "$mirror" ] || mirror=$(sed -n 's/^deb  *\(\[[^]]*\] *\)\{0,1\}\([^ ]*\) .*/\2/p' /etc/apt/sources.list 2>/dev/null | head -1)
  [ -n "$mirror" ] || { echo "no Debian mirror in this machine's apt sources" >&2; exit 1; }
  mkdir -p lists/partial cache/archives/partial
  printf 'Types: deb\nURIs: %s\nSuites: trixie\nComponents: main\nSigned-By: /usr/share/keyrings/debian-archive-keyring.gpg\n' "$mirror" > only.sources
  apt() { apt-get -qq -o Dir::Etc::sourcelist="$work/only.sources" -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists="$work/lists" -o Dir::Cache="$work/cache" "$@"; }
  apt update
  apt download libonnxruntime-dev
fi
dpkg -x libonnxruntime-dev*.deb "$out"
