#!/bin/sh
# Check and measure the kernels on this machine's GPU: no network, no installation, under 8 minutes.
# Needs python3 with torch, triton, transformers and pytest; Liger-Kernel, quack and matplotlib are used where installed.
# Figures go to the folder given, or to the current one. Ends with 1 where a test failed or an operation was wrong.
set -u
here=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "${1:-.}"
out=$(cd "${1:-.}" && pwd)
export PYTHONPATH="$here/kernels/torch-ext:$here${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1
cd "$here" || exit 2
python3 -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'gpu.sh: torch sees no GPU here')" || exit 2
status=0

# The project's pytest settings name plugins that this machine may lack. Most of the time goes into compiling, so that
# four processes side by side take a quarter of it.
check() {
    name=$1
    shift
    timeout 220 python3 -m pytest -c /dev/null --rootdir "$here" -p no:cacheprovider -q "$@" >"$out/tests-$name.log" 2>&1 &
}
check gpu tests/kernels/test_gpu.py
started=$!
check forward tests/kernels/test_devices.py -k test_forward
started="$started $!"
check backward tests/kernels/test_devices.py -k test_backward
started="$started $!"
check rest tests/kernels/test_devices.py -k "not test_forward and not test_backward"
started="$started $!"
for process in $started; do
    wait "$process" || status=1
done
for name in gpu forward backward rest; do
    tail -n 25 "$out/tests-$name.log"
done

timeout 40 python3 benchmarks/launch.py --json "$out/launch-gpu.json" || status=1
timeout 140 python3 benchmarks/kernels.py --device cuda --peer transformers formula functional liger quack \
    --budget 110 --seconds 0.5 --json "$out/kernels-gpu.json" --plot "$out/kernels-gpu.png" || status=1
# torch.compile takes seconds for each shape, and so stands beside the operations that matter most.
timeout 70 python3 benchmarks/kernels.py --device cuda --peer compile --operation rms_norm add_rms_norm layer_norm \
    --dtype bfloat16 --shape 4096x4096 1x4096 --budget 50 --json "$out/compiled-gpu.json" || status=1
exit "$status"
