#!/bin/sh
# Check and measure the kernels on this machine's GPU: no network, no installation, under 8 minutes.
# Needs python3 with torch, triton, transformers and pytest. Figures go to the folder given, or to the current one.
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-.}
mkdir -p "$out"
export PYTHONPATH="$here/kernels/torch-ext:$here${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1
cd "$here"
python3 -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'gpu.sh: torch sees no GPU here')"
# The project's pytest settings name plugins that this machine may lack.
timeout 270 python3 -m pytest -c /dev/null --rootdir "$here" -p no:cacheprovider -q -m gpu tests/kernels || status=$?
timeout 180 python3 benchmarks/norms.py --device cuda --shape 16384x4096 --shape 2048x4096 --shape 1x4096 \
    --shape 65536x128 --shape 1024x65536 --json "$out/norms-gpu.json"
exit "${status:-0}"
