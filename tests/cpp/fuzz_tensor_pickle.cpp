// Any bytes: the tensor pickle's machine says yes or no, and its views stay inside the bytes.
#include "format/tensor_pickle.h"
#include "fuzz.h"

FUZZ(tensor_pickle) {
  dcpx::PickledTensor tensor;
  if (dcpx::parse_tensor_pickle(reinterpret_cast<const std::byte*>(data), size, &tensor)) {
    const auto* first = reinterpret_cast<const char*>(data);
    for (const std::string_view view :
         {tensor.storage_module, tensor.storage_name, tensor.dtype_name, tensor.storage_key}) {
      if (!view.empty() && (view.data() < first || view.data() + view.size() > first + size)) {
        __builtin_trap();
      }
    }
  }
}
