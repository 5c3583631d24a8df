// Python objects over memory that copies which took too long may still use.
#pragma once

#include <pybind11/pybind11.h>

namespace dcpx {

// Keeps `object` until no copy that was given up can be under way; lets it go at once where none
// is. What has been kept goes at a later call of one of these. With the GIL.
void keep_while_copied(pybind11::object object);
void forget_copied();

}  // namespace dcpx
