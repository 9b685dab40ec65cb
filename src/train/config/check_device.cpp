#include "train/config/check_device.h"

#include "compat/cuda.h"

#include <c10/util/Exception.h>

namespace reprise::detail {

c10::Device check_device(const TrainOptions& config) {
  c10::Device device(config.device);
  if (device.is_cuda() && !device.has_index()) device.set_index(0);
  TORCH_CHECK(device.is_cpu() || device.is_cuda(),
              "[--device] expected cpu, cuda or cuda:N, got ", config.device);
  const int count = compat::cuda_device_count();
  TORCH_CHECK(!device.is_cuda() || count > 0,
              "[--device] expected cpu, no CUDA devices are here, got ",
              config.device);
  TORCH_CHECK(!device.is_cuda() || device.index() < count,
              "[--device] expected one of ", count,
              " CUDA devices, cuda:0 to cuda:", count - 1, ", got ",
              config.device);
  TORCH_CHECK(config.precision != Precision::kFp16 || device.is_cuda(),
              "[--precision] fp16 needs a CUDA device; on the CPU use bf16");
  return device;
}

}  // namespace reprise::detail
