// The door: one bind_*.cpp per room. Tables in, tables out, the GIL released, errors translated.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace dcpx {

void bind_errors();
void bind_format(pybind11::module_& m);
void bind_metadata(pybind11::module_& m);
void bind_unpickle(pybind11::module_& m);
void bind_columns(pybind11::module_& m);
void bind_plain(pybind11::module_& m);
void bind_io(pybind11::module_& m);
void bind_gil(pybind11::module_& m);  // for the end of the interpreter
void bind_plan(pybind11::module_& m);
void bind_save_rows(pybind11::module_& m);
void bind_plan_items(pybind11::module_& m);
void bind_plan_state(pybind11::module_& m);
void bind_write(pybind11::module_& m);
void bind_read(pybind11::module_& m);
void bind_read_rows(pybind11::module_& module);  // what a load makes of each item
void bind_verify(pybind11::module_& m);
void bind_range(pybind11::module_& m);
void bind_stage(pybind11::module_& m);
void bind_device(pybind11::module_& m);

// UTF-8 of a str; lone surrogates, which a key may hold, pass as they do in a pickle.
std::string to_string(const pybind11::handle& value);

// A tuple or list of ints. Throws what Python raises for anything else.
std::vector<std::int64_t> int_tuple(const pybind11::handle& values);

// Buffers that must stay exported while workers use their memory. Give it back with the GIL held.
class PinnedBuffers {
 public:
  PinnedBuffers() = default;
  PinnedBuffers(const PinnedBuffers&) = delete;
  PinnedBuffers& operator=(const PinnedBuffers&) = delete;
  ~PinnedBuffers();

  // `source` is an address (int) with `nbytes` valid bytes behind it, or an object with a
  // contiguous buffer, whose size replaces `nbytes`. Throws what Python raises.
  std::byte* add(const pybind11::handle& source, bool is_writable, std::uint64_t& nbytes);

 private:
  std::vector<Py_buffer> views_;
};

}  // namespace dcpx
