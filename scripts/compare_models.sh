#!/usr/bin/env bash
# Compares loss and gradients of full-size models with the reference implementations
# (gpt2, bert and vit of Hugging Face, resnet50 of torchvision), loaded from the same
# safetensors file: in double precision on the CPU, and in single precision on the same
# device. Needs a build and python3 with torch, torchvision, transformers and safetensors.
#
#   scripts/compare_models.sh BUILD-DIR [DEVICE...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
build=$1
devices=("${@:2}")
[ ${#devices[@]} -gt 0 ] || devices=(cpu)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 tests/fixtures/make_model_values.py --full "$work" \
  "${devices[@]/#/--single=}"
status=0
for device in "${devices[@]}"; do
  for precision in ${PRECISIONS:-double single}; do
    values=$precision
    [ $precision = double ] || values=single-$device
    for name in gpt2 bert-base vit-b-16 resnet50; do
      printf '%s, %s, %s: ' $name $precision "$device"
      "$build/tests/model_values" $name "$work/$name.weights.safetensors" \
        "$work/$name.$values.safetensors" --device "$device" \
        --precision $precision || status=1
    done
  done
done
exit $status
