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

// The pickle in `archive`, and its size in `pickle_bytes`, where the archive is what object_zip
// makes of it, to the last byte; else null.
const std::byte* find_object_pickle(const std::byte* archive, std::uint64_t nbytes,
                                    std::uint64_t& pickle_bytes);

}  // namespace dcpx
