// An object without tensors as torch.save writes it: a zip archive around its pickle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace dcpx {

// What object_zip adds to a pickle.
std::uint64_t object_zip_overhead() noexcept;

// The archive of a pickle, which nothing here looks at. Throws Error(kPlan) above 1 GiB.
std::vector<std::byte> object_zip(const std::byte* pickle, std::uint64_t nbytes);

}  // namespace dcpx
