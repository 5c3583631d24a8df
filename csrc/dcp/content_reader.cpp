// What stands for the contents of tensors, so that ranks can tell whether theirs are equal.
//
// Contiguous tensors of the host are read here, without the GIL. The others are left to Python,
// which takes the same samples of them.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/sample_hash.h"
#include "dcp/dcp.h"
#include "dcp/fields.h"
#include "dcp/gil.h"
#include "dcp/objects.h"
#include "dcp/tensor_fields.h"

namespace dcpx {
namespace {

namespace py = pybind11;

// How the bytes of a dtype are numbers.
struct NumberForm {
  std::uint64_t part_bytes = 1;
  std::uint64_t top = 0;  // as of LineHash
};

struct Content {
  const std::byte* data = nullptr;
  std::uint64_t nbytes = 0;
  NumberForm form;
  std::uint64_t seed = 0;
};

std::uint64_t content_hash_of(const Content& one, bool is_whole) {
  switch (one.form.part_bytes) {
    case 2:
      return content_hash<std::uint16_t>(one.data, one.nbytes, is_whole, one.seed, one.form.top);
    case 4:
      return content_hash<std::uint32_t>(one.data, one.nbytes, is_whole, one.seed, one.form.top);
    case 8:
      return content_hash<std::uint64_t>(one.data, one.nbytes, is_whole, one.seed, one.form.top);
    default:
      return content_hash<std::uint8_t>(one.data, one.nbytes, is_whole, one.seed, one.form.top);
  }
}

// Of a name: contents that change places differ.
std::uint64_t name_seed(const py::handle& name) {
  if (PyUnicode_Check(name.ptr()) == 0) throw py::type_error("a name is a str");
  const auto nbytes = static_cast<std::uint64_t>(
      PyUnicode_GET_LENGTH(name.ptr()) * static_cast<Py_ssize_t>(PyUnicode_KIND(name.ptr())));
  return content_hash<std::uint8_t>(static_cast<const std::byte*>(PyUnicode_DATA(name.ptr())),
                                    nbytes, /*is_whole=*/true, /*seed=*/nbytes, /*top=*/0);
}

class ContentReader {
 public:
  explicit ContentReader(const py::dict& parts)
      : tensor_(parts["Tensor"]),
        parameter_(parts["Parameter"]),
        forms_(parts["forms"].cast<py::dict>()),
        fields_(parts["strided"]) {}

  py::tuple digests(const py::list& names, const py::list& tensors, const py::object& is_host,
                    bool are_samples) const {
    if (py::len(names) != py::len(tensors)) throw py::value_error("a name a tensor is wanted");
    const py::tuple kept(tensors);  // its memory, while others have the GIL
    std::vector<Content> contents(py::len(kept));
    py::list others;
    for (std::size_t i = 0; i < contents.size(); ++i) {
      if (!describe(field(kept, static_cast<Py_ssize_t>(i)), is_host, &contents[i])) {
        others.append(i);
        continue;
      }
      contents[i].seed = name_seed(PyList_GET_ITEM(names.ptr(), static_cast<Py_ssize_t>(i)));
    }
    std::string out(contents.size() * sizeof(std::uint64_t), '\0');
    {
      const ReleasedGil no_gil;
      for (std::size_t i = 0; i < contents.size(); ++i) {
        if (contents[i].data == nullptr && contents[i].nbytes > 0) continue;
        const std::uint64_t hash = content_hash_of(contents[i], are_samples);
        std::memcpy(out.data() + i * sizeof hash, &hash, sizeof hash);
      }
    }
    return py::make_tuple(py::bytes(out), others);
  }

 private:
  bool describe(const py::handle& tensor, const py::object& is_host, Content* content) const {
    content->nbytes = 1;  // until all is known: skipped
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
    if ((type != tensor_.ptr() && type != parameter_.ptr()) ||
        !is_true(checked(PyObject_CallOneArg(is_host.ptr(), tensor.ptr()))) ||
        !fields_.is_plain(tensor)) {
      return false;
    }
    const py::handle form = find(forms_, get_attr(tensor, dtype_));
    if (form) {
      check_tuple(form, 2, "a form has 2 fields");
      content->form = {to_u64(field(form, 0)), to_u64(field(form, 1))};
    }
    const std::uint64_t nbytes = to_u64(get_attr(tensor, nbytes_));
    if (nbytes == 0) {
      content->nbytes = 0;
      return true;
    }
    const TensorFields::Memory memory = fields_.memory(tensor);
    if (memory.address == 0 || memory.storage_begin + nbytes > memory.storage_bytes) return false;
    content->nbytes = nbytes;
    content->data = reinterpret_cast<const std::byte*>(memory.address);
    return true;
  }

  py::object tensor_, parameter_;
  py::dict forms_;  // (bytes of a part, top) by dtype; of any other dtype bytes are bytes
  py::object dtype_ = interned("dtype"), nbytes_ = interned("nbytes");
  TensorFields fields_;
};

py::object sample_begins(std::uint64_t nbytes) {
  if (nbytes <= kWholeBytes) return py::none();
  const Samples samples(nbytes);
  py::list begins;
  for (std::uint64_t i = 0; i < samples.count(); ++i) begins.append(samples.begin(i));
  return begins;
}

}  // namespace

void bind_content_reader(py::module_& module) {
  py::class_<ContentReader>(module, "ContentReader", "Makes digests of the contents of tensors.")
      .def(py::init<const py::dict&>(), py::arg("parts"))
      .def("digests", &ContentReader::digests, py::arg("names"), py::arg("tensors"),
           py::arg("is_host"), py::arg("are_samples") = false,
           "(8 bytes a tensor, numbers of the tensors that are not read here).");
  module.attr("SAMPLE_BYTES") = kSampleBytes;
  module.def("sample_begins", &sample_begins, py::arg("nbytes"),
             "Where the samples of so many bytes begin; None: all of them are looked at.");
}

}  // namespace dcpx
