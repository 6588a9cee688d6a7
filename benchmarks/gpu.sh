#!/bin/sh
# Check and measure the kernels on this machine's GPU: no network, no installation, under 8 minutes.
# Needs python3 with torch, triton, transformers and pytest; Liger-Kernel, quack and matplotlib are used where installed.
# Figures go to the folder given, or to the current one. Ends with 1 where a test failed or an operation was wrong.
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-.}
mkdir -p "$out"
out=$(cd "$out" && pwd)
export PYTHONPATH="$here/kernels/torch-ext:$here${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1
cd "$here" || exit 2
python3 -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'gpu.sh: torch sees no GPU here')" || exit 2
status=0
# The project's pytest settings name plugins that this machine may lack. Tests for any device run on the GPU here.
for marks in "gpu" "not gpu"; do
    tests=tests/kernels
    [ "$marks" = gpu ] || tests=tests/kernels/test_devices.py
    timeout 120 python3 -m pytest -c /dev/null --rootdir "$here" -p no:cacheprovider -q -m "$marks" "$tests" || status=1
done
timeout 30 python3 benchmarks/launch.py --json "$out/launch-gpu.json" || status=1
timeout 200 python3 benchmarks/kernels.py --device cuda --budget 150 --seconds 0.5 \
    --json "$out/kernels-gpu.json" --plot "$out/kernels-gpu.png" || status=1
exit "$status"
