// DCP's plan items, made and put together by the thousand: see dcp/plan_items.h.
#include "bind/bind.h"
#include "dcp/item_wire.h"
#include "dcp/plan_items.h"
#include "dcp/stored_columns.h"

namespace dcpx {

namespace py = pybind11;

void bind_plan_items(py::module_& module) {
  py::class_<ItemMaker>(module, "ItemMaker", "Makes DCP's plan items out of rows.")
      .def(py::init<const py::dict&>(), py::arg("classes"))
      .def("read_items", &make_read_items, py::arg("rows"), py::arg("fallback"),
           py::arg("is_swept"), py::arg("columns") = py::none(),
           "(items, offences) of a load plan.")
      .def("write_items", &make_write_items, py::arg("rows"), "The items of a rank's save plan.")
      .def("dedup_items", &dedup_items, py::arg("plans"), py::arg("can_split"),
           py::arg("to_lowest_rank"), py::arg("lowest_names"), py::arg("whole_names"),
           py::arg("unlike") = py::none(),
           "The items of each rank, so that each chunk is written once; as they were where "
           "`unlike`, "
           "a list, was given what `unlike_items` finds.")
      .def("unlike_items", &unlike_items, py::arg("plans"),
           "(fqn, rank, other rank) of the names that are not one object or tensor on all ranks.")
      .def("global_plan", &make_global_plan, py::arg("plans"), py::arg("kept") = py::list(),
           "(items of each rank, metadata's entries, offences) of a save.")
      .def("copied_entries", &copy_entries, py::arg("entries"),
           "A metadata's entries, of which nothing that can change is shared.")
      .def("pack_plan", &pack_plan, py::arg("items"), py::arg("paths"), py::arg("names"),
           "(message, properties, items that are not packed, whether the paths are).")
      .def("unpack_plan", &unpack_plan, py::arg("message"), py::arg("properties"),
           py::arg("others"), py::arg("is_shared"), "(items, paths or None, names).")
      .def("pack_results", &pack_results, py::arg("results"),
           "(message, results that are not packed).")
      .def("unpack_results", &unpack_results, py::arg("message"), py::arg("others"),
           "The results.");
  py::class_<StoredColumns>(module, "StoredColumns", "What a `.metadata` says, made on demand.")
      .def(py::init<ItemMaker&, const py::list&, const py::dict&, const py::dict&>(),
           py::arg("maker"), py::arg("strings"), py::arg("columns"), py::arg("values"),
           py::keep_alive<1, 2>())
      .def_property_readonly("has_twins", &StoredColumns::has_twins)
      .def_property_readonly("item_count", &StoredColumns::item_count)
      .def_property_readonly("made_count", &StoredColumns::made_count)
      .def_property_readonly("probe_count", &StoredColumns::probe_count)
      .def("entry", &StoredColumns::entry, py::arg("number"), py::arg("has_chunks") = true)
      .def("entries", &StoredColumns::entries, py::arg("numbers"))
      .def("chunk", &StoredColumns::chunk, py::arg("number"), py::arg("at"))
      .def("place", &StoredColumns::place, py::arg("index"))
      .def("places", &StoredColumns::places, py::arg("indices"))
      .def("all_places", &StoredColumns::all_places);
}

}  // namespace dcpx
