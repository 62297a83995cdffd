#!/usr/bin/env bash
# Generate swarm/wire/*_pb2.py(i) from proto/swarm/wire/*.proto. With --check, generate elsewhere and fail when the committed files differ.
# libp2p pins protobuf<7, so the generator must emit code that loads there: grpcio-tools 1.81 does, 1.85 does not.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
out=.
[ "${1:-}" = "--check" ] && out=$(mktemp -d)
"$python" -m grpc_tools.protoc -Iproto --python_out="$out" --pyi_out="$out" proto/swarm/wire/*.proto
if [ "$out" != . ]; then
  trap 'rm -rf "$out"' EXIT
  for file in "$out"/swarm/wire/*; do
    cmp -s "$file" "swarm/wire/$(basename "$file")" || { echo "swarm/wire/$(basename "$file") is not what proto/ generates: run 'make proto' and commit"; exit 1; }
  done
fi
