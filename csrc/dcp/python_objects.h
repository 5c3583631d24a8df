// A store of objects that Python speaks to.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "io/object_store.h"

namespace dcpx {

// Returns a store by an object of Python's, whose methods any thread may call at any time. What
// they raise of StorageError and UnsupportedError it throws as Error, of which Python makes the
// same again; anything else as Python's.
//   look(name, nbytes) -> (bytes of the whole object, tag, buffer with its last bytes)
//   read(name, tag, begin, end) -> buffer with the bytes [begin, end)
std::shared_ptr<io::ObjectStore> python_objects(const pybind11::object& objects);

}  // namespace dcpx
