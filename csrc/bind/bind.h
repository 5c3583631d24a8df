// The door: one bind_*.cpp per room. Tables in, tables out, the GIL released, errors translated.
#pragma once

#include <pybind11/pybind11.h>

namespace dcpx {

void bind_errors();
void bind_format(pybind11::module_& m);
void bind_metadata(pybind11::module_& m);
void bind_unpickle(pybind11::module_& m);
void bind_columns(pybind11::module_& m);
void bind_plain(pybind11::module_& m);
void bind_io(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_plan_items(pybind11::module_& m);
void bind_write(pybind11::module_& m);
void bind_read(pybind11::module_& m);
void bind_verify(pybind11::module_& m);
void bind_values(pybind11::module_& m);
void bind_range(pybind11::module_& m);
void bind_stage(pybind11::module_& m);
void bind_device(pybind11::module_& m);

}  // namespace dcpx
