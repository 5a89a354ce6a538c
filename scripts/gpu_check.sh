#!/usr/bin/env bash
# Checks and measures the cuda backend on a machine with a GPU.
#
#     bash scripts/gpu_check.sh STAGE...
#
# facts            what the code assumes of driver, CUPTI and torch
# pieces           capture tiny-qwen3 and encode it, step by step, in one process
# smoke            save tiny-qwen3 (moved and poisoned in its proof), restore it in a fresh process
# tests            refusals, relocation, two archives, leaks, the engine example
# engine           the last of these alone
# dispatch         rows that come and go over eight buckets, and the fallback to the model itself
# pool             a hundred switches between models of which one is awake, how fast they wake (after bench quick)
# compile          the smoke stage for torch.compile's kernels, with empty caches
# piecewise-parts  what prompts in pieces are made of, part by part, in a process for each model
# piecewise        prompts through restored pieces: beside eager, and the time to the first token
# archives         the two small archives for tests/archives, as one tar file
# throughput       decoded tokens a second beside eager and torch.compile (after bench compile)
# two              two ranks on two GPUs: qwen3-0.6b and llama-3.2-1b, or those of $TWO, beside one GPU; one is killed
# gap              which acts of a process slow its later replays down (after bench quick)
# upload MODEL     how fast weights reach the device, in each way
# hash             the kernel that hashes weights: its digests beside hashlib's, and its GB/s
# real             SmolLM2 with its real weights against transformers; see scripts/gpu/real.py for how they travel
# bench MODEL      save, restore and measure a big model: 0.6b, 1b, 8b, compile for 0.6b compiled, quick for four buckets
# kept MODEL       the same with the archive that an earlier run left in $GPU_WORK, without what needs torch
#
# A stage that fails is reported with its traceback, and the next one runs. What was measured is written as JSON to
# $OUT (build/gpu without). Python packages that are missing come from wheels in .whl/.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT="${OUT:-build/gpu}"
mkdir -p "$OUT" build/gpu
export OUT GPU_WORK="${GPU_WORK:-$PWD/build/gpu}"
PYTHON="${PYTHON:-python3}"
export PYTHONPATH="$PWD:$PWD/build/gpu-site${PYTHONPATH:+:$PYTHONPATH}" PYTHONFAULTHANDLER=1 PYTHONUNBUFFERED=1
# Where nothing may be compiled once and kept, importing numpy alone takes 0.4 s of every process: no user's machine does.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$PWD/build/gpu/pycache"

install_missing() { # MODULE:PACKAGE...
    local pair missing=()
    for pair in "$@"; do
        "$PYTHON" -c "import ${pair%%:*}" 2>/dev/null || missing+=("${pair##*:}")
    done
    [ "${#missing[@]}" -eq 0 ] && return
    echo "installing ${missing[*]}"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --find-links .whl --no-deps \
        --target build/gpu-site "${missing[@]}"
}

table=()
stage() { # NAME LIMIT COMMAND...
    local name="$1" limit="$2" start seconds status
    shift 2
    echo "== $name"
    start=$(date +%s.%N)
    timeout -k 5 "$limit" "$@"
    status=$?
    seconds=$(echo "$(date +%s.%N) $start" | awk '{printf "%.1f", $1 - $2}')
    [ "$status" -eq 124 ] && echo "-- $name ran into its limit of $limit s"
    table+=("$(printf '%-14s %8s s  %s' "$name" "$seconds" "$([ "$status" -eq 0 ] && echo passed || echo "FAILED ($status)")")")
    [ "$status" -eq 0 ] || failed=1
}

failed=0
install_missing zstandard:zstandard msgpack:msgpack yaml:pyyaml click:click rich:rich markdown_it:markdown_it_py \
    mdurl:mdurl pygments:pygments numpy:numpy
while [ "$#" -gt 0 ]; do
    case "$1" in
        facts) stage facts 60 "$PYTHON" scripts/gpu/facts.py ;;
        pieces) stage pieces 60 "$PYTHON" scripts/gpu/pieces.py ;;
        smoke) stage smoke 150 "$PYTHON" scripts/gpu/smoke.py ;;
        tests) stage tests 300 "$PYTHON" scripts/gpu/checks.py ;;
        engine) stage engine 120 "$PYTHON" scripts/gpu/checks.py engine ;;
        dispatch) stage dispatch 300 "$PYTHON" scripts/gpu/dispatch.py ;;
        pool) stage pool 120 "$PYTHON" scripts/gpu/pool.py ;;
        compile) stage compile 240 "$PYTHON" scripts/gpu/smoke.py --compile ;;
        piecewise-parts) stage piecewise-parts 240 "$PYTHON" scripts/gpu/piecewise_parts.py ;;
        piecewise) stage piecewise 560 "$PYTHON" scripts/gpu/piecewise.py ;;
        piecewise-right) stage piecewise-right 200 "$PYTHON" scripts/gpu/piecewise.py right ;;
        piecewise-fast) stage piecewise-fast 420 "$PYTHON" scripts/gpu/piecewise.py fast ;;
        archives) stage archives 240 "$PYTHON" scripts/gpu/archives.py ;;
        real)
            install_missing gguf:gguf accelerate:accelerate psutil:psutil tokenizers:tokenizers tqdm:tqdm
            stage real 300 "$PYTHON" scripts/gpu/real.py
            ;;
        throughput) stage throughput 300 "$PYTHON" scripts/gpu/throughput.py ;;
        two) stage two 580 "$PYTHON" scripts/gpu/two_gpus.py ${TWO:-} ;;
        gap) stage gap 240 "$PYTHON" scripts/gpu/gap.py ;;
        hash) stage hash 60 "$PYTHON" scripts/gpu/leaf_hash.py ;;
        upload)
            stage "upload $2" 240 "$PYTHON" scripts/gpu/upload.py "$2"
            shift
            ;;
        bench)
            stage "bench $2" 560 "$PYTHON" scripts/gpu/bench.py "$2"
            shift
            ;;
        kept)
            stage "kept $2" 300 "$PYTHON" scripts/gpu/bench.py "$2" kept
            shift
            ;;
        *)
            echo "no such stage: $1" >&2
            exit 2
            ;;
    esac
    shift
done
echo "== result"
printf '%s\n' "${table[@]}"
exit "$failed"
