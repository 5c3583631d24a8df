// The extension module torch_dcpx._C. Its Python side is typed in torch_dcpx/_C.pyi.
#include <pybind11/pybind11.h>

#include "bind/bind.h"
#include "dcp/dcp.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ side of torch_dcpx: addresses, byte counts and names in, tables out.";
  dcpx::bind_errors();
  dcpx::bind_format(m);
  dcpx::bind_metadata(m);
  dcpx::bind_unpickle(m);
  dcpx::bind_columns(m);
  dcpx::bind_plain(m);
  dcpx::bind_io(m);
  dcpx::bind_gil(m);
  dcpx::bind_plan(m);
  dcpx::bind_plan_state(m);
  dcpx::bind_save_rows(m);
  dcpx::bind_content_reader(m);
  dcpx::bind_write(m);
  dcpx::bind_read(m);
  dcpx::bind_read_rows(m);
  dcpx::bind_verify(m);
  dcpx::bind_values(m);
  dcpx::bind_range(m);
  dcpx::bind_stage(m);
  dcpx::bind_device(m);
}
