#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs a GPU, in one go: correctness first, then the memory checker on small shapes, then the benchmark.
#   benchmarks/gpu_suite.sh OUT_FOLDER [tests|sanitize|bench|sparse ...]      (default: the first three)
# sparse: whole models, which need transformers 5.23 (PYTHONPATH with it will do) and half an hour. Jobs that are done are
# kept in OUT_FOLDER/sparse, from which a second call goes on.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?usage: benchmarks/gpu_suite.sh OUT_FOLDER [tests|sanitize|bench|sparse ...]}
shift
steps=${*:-tests sanitize bench}
mkdir -p "$out"
export PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
status=0
for step in $steps; do
    case $step in
    tests)
        # Many small compiles: the tests share the GPU, all but those that measure it. -v writes each result as it comes, so
        # that the log of a run that is cut off names what failed.
        gpu="tests/test_gpu.py tests/test_gpu_e79.py tests/test_gpu_few_tokens.py tests/test_gpu_index.py \
            tests/test_gpu_lists.py tests/test_gpu_packages.py tests/test_gpu_selection.py tests/test_gpu_single_pass.py"
        python3 -m pytest -v -p no:cacheprovider -n 14 tests --ignore tests/test_wheel.py --ignore tests/test_results.py \
            $(printf -- '--ignore %s ' $gpu) --tb=short --show-capture=no 2>&1 | tee "$out/tests.log" | tail -25 || status=1
        python3 -m pytest -v -p no:cacheprovider $gpu --tb=short --show-capture=no 2>&1 |
            tee "$out/tests_gpu.log" | tail -25 || status=1
        ;;
    sanitize)
        compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m pytest -q -p no:cacheprovider \
            tests/test_kernels_mhc.py tests/test_kernels_single_pass.py -x --show-capture=no \
            -k "pre_without or pre_odd or test_head or no_token or strided or dx_acc or transpose" 2>&1 | tee "$out/sanitizer.log" | tail -15 || status=1
        compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m pytest -q -p no:cacheprovider \
            tests/test_kernels_e79.py -x --show-capture=no -k "widths or one_step or no_sequence or non_contiguous" 2>&1 |
            tee "$out/sanitizer_e79.log" | tail -15 || status=1
        compute-sanitizer --tool racecheck --error-exitcode 9 python3 -m pytest -q -p no:cacheprovider \
            tests/test_kernels_e79.py -x --show-capture=no -k "widths and input and (16 or 64)" 2>&1 |
            tee "$out/racecheck_e79.log" | tail -15 || status=1
        compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m pytest -q -p no:cacheprovider \
            tests/test_kernels_selection.py -x \
            --show-capture=no -k "widths or heads or packed or many_ranges or stride or empty" 2>&1 |
            tee "$out/sanitizer_selection.log" | tail -15 || status=1
        compute-sanitizer --tool racecheck --error-exitcode 9 python3 -m pytest -q -p no:cacheprovider \
            tests/test_kernels_selection.py -x --show-capture=no -k "heads and (tiles or gather or splits)" 2>&1 |
            tee "$out/racecheck_selection.log" | tail -15 || status=1
        compute-sanitizer --tool memcheck --error-exitcode 9 python3 -m pytest -q -p no:cacheprovider \
            tests/test_kernels_selection_lists.py tests/test_kernels_index.py -x --show-capture=no \
            -k "(widths and (512 or 576 or 256)) or dtypes or packed or segments or numbers or nothing" 2>&1 |
            tee "$out/sanitizer_lists.log" | tail -15 || status=1
        compute-sanitizer --tool racecheck --error-exitcode 9 python3 -m pytest -q -p no:cacheprovider \
            tests/test_kernels_selection_lists.py tests/test_kernels_index.py -x --show-capture=no \
            -k "widths and (dtype1 or bfloat16) and (512 or 576 or 128)" 2>&1 | tee "$out/racecheck_lists.log" | tail -15 || status=1
        ;;
    bench)
        python3 -m benchmarks mhc --peers --out "$out" 2>&1 | tee "$out/bench.log" | tail -80 || status=1
        python3 -m benchmarks e79 --out "$out" 2>&1 | tee "$out/bench_e79.log" | tail -120 || status=1
        # flash-linear-attention is timed beside it where it imports (PYTHONPATH with fla-core and einops will do).
        python3 -m benchmarks selection --out "$out" 2>&1 | tee "$out/bench_selection.log" | tail -200 || status=1
        python3 -m benchmarks lists --out "$out" 2>&1 | tee "$out/bench_lists.log" | tail -200 || status=1
        python3 -m benchmarks index --out "$out" 2>&1 | tee "$out/bench_index.log" | tail -60 || status=1
        ;;
    sparse)
        python3 -m benchmarks sparse_models --keep "$out/sparse" --out "$out" 2>&1 | tee "$out/bench_sparse.log" | tail -80 || status=1
        ;;
    *)
        echo "unknown step $step" >&2
        exit 2
        ;;
    esac
done
exit $status
