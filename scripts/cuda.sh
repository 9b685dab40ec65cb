#!/usr/bin/env bash
# Builds against a CUDA LibTorch, runs all tests on the CPU and on the GPU,
# verifies, and runs the benchmarks. For any machine with a GPU and a LibTorch
# that has CUDA (python3's torch, or REPRISE_TORCH=DIR); installs nothing.
#
#   scripts/cuda.sh            everything
#   scripts/cuda.sh build      only the build; also: test, verify, models, bench,
#                              plan (predictions and a sweep), peers (comparison with
#                              PyTorch), study (mnist, bert and gpt2 into out/), speed
#                              (comparison with PyTorch's techniques, compiler and CUDA
#                              graphs)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export REPRISE_SETUP=off
steps=("${@:-all}")
want() { [[ " ${steps[*]} " == *" all "* || " ${steps[*]} " == *" $1 "* ]]; }
failed=()
# step NAME COMMAND...: runs the command; records a failure and continues.
step() {
  local name=$1
  shift
  printf '\n== %s\n' "$name"
  "$@" || failed+=("$name")
}

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
if want build || [ ! -d build/cuda ]; then
  step configure cmake --preset cuda -DREPRISE_CUDA_ARCH=native
  step build cmake --build --preset cuda -- -k 0
fi
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}"; exit 1; }
bin=build/cuda
if want test; then
  step "tests, CPU" ctest --test-dir $bin --output-on-failure -j "$(nproc)"
  # Several at a time: each process measures its own memory.
  step "tests, CUDA" env REPRISE_TEST_DEVICE=cuda ctest --test-dir $bin \
    --output-on-failure -j 8 -LE slow
fi
if want verify; then
  step "verify, CPU" $bin/tools/reprise/reprise verify 2>/dev/null
  step "verify, CUDA" $bin/tools/reprise/reprise verify --device cuda 2>/dev/null
  step "verify nested, CUDA" $bin/tools/reprise/reprise verify --device cuda --nested 2>/dev/null
fi
if want models; then
  step "models against their originals" scripts/compare_models.sh $bin cpu cuda
fi
if want bench; then
  step "executor, CPU" $bin/bench/executor_bench --repeats 11
  step "executor, CUDA" $bin/bench/executor_bench --device cuda --repeats 51
  step "loader, CUDA" $bin/bench/loader_bench --device cuda
  step "products, CUDA" $bin/bench/tf32x3_gemm_bench --device cuda
  step "first convolutions, CUDA" $bin/bench/image_conv_bench --device cuda
  step "trade-off, CUDA" $bin/bench/tradeoff_bench --device cuda --width 1024 --rows 8192
fi
if want plan; then
  step "plans, CUDA" $bin/bench/plan_bench --device cuda
  step "plans against a sweep, CUDA" $bin/bench/plan_bench --device cuda --sweep \
    --models resnet50,gpt2,cnn-basic --windows 3
fi
if want study; then
  # Resumes the results of an interrupted call.
  study() {
    local name=$1
    shift
    step "study $name" $bin/tools/reprise/reprise study "$name" --device cuda \
      --out "out/$name" --resume --no-estimate "$@"
  }
  study mnist --set seconds=1
  study bert --set seconds=4
  study gpt2
  step "Hugging Face's Trainer" python3 bench/peers/bert_trainer.py out/bert-peer \
    --samples 128
fi
if want speed; then
  step "beside PyTorch" python3 bench/gpu.py $bin/tools/reprise/reprise
  step "plain models beside PyTorch" python3 bench/gpu.py $bin/tools/reprise/reprise --plain
fi
if want peers; then
  for model in resnet101 vgg16; do
    step "checkpoint_sequential, $model" python3 bench/peers/checkpoint_sequential.py \
      $bin/tools/reprise/reprise --model $model
  done
fi
if [ ${#failed[@]} -gt 0 ]; then
  printf '\nfailed: %s\n' "${failed[*]}"
  exit 1
fi
printf '\nall passed\n'
