// What this room registers by itself, for bind/module.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace dcpx {

void bind_gil(pybind11::module_& m);  // for the end of the interpreter
void bind_save_rows(pybind11::module_& m);
void bind_plan_state(pybind11::module_& m);
void bind_read_rows(pybind11::module_& module);  // what a load makes of each item
void bind_content_reader(pybind11::module_& module);

}  // namespace dcpx
