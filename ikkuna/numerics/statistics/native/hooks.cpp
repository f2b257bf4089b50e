// The hooks of outputs of modules and of their gradients, compiled with the headers of torch and Python as a library of its own.
//
// A hook in Python decides what is measured, and writes the result of its decision into a permit.  Until the permit ends, the
// functions below repeat the decision for the hooks that follow.  Whatever is not covered by the permit is left to Python.

#include <Python.h>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/utils/object_ptr.h>

#include <ctime>
#include <memory>
#include <vector>

// The headers of these need much memory to compile, or files that the package of torch does not have.
namespace at::functorch {
struct DynamicLayer;
TORCH_API const std::vector<DynamicLayer> &getDynamicLayerStack();
}  // namespace at::functorch
namespace torch::jit::tracer {
struct TracingState;
TORCH_API const std::shared_ptr<TracingState> &getTracingState();
}  // namespace torch::jit::tracer
namespace torch::autograd {
TORCH_API int get_current_graph_task_id();
}  // namespace torch::autograd

namespace {

using at::Tensor;
using torch::autograd::variable_list;

// What may be measured without Python; `Permits` has the same order.
struct Permit {
    int64_t thread;        // the thread whose tensors are measured; 0 for none
    const int64_t *table;  // where the address of the first row is
    const int32_t *wanted; // by row, what to measure, or one of the values below
    int64_t rows;          // the number of rows in `wanted`
    int64_t task;          // the number of the running backward, for gradients
    int64_t forward;       // the number of the forward
    int64_t nanoseconds;   // spent here
};
constexpr int NOTHING = -1, PYTHON = -2;
constexpr int64_t LONG = 1 << 15;  // other threads of Python may run meanwhile

using Measure = void (*)(const void *x, int64_t n, int wanted, void *row);
Measure kernels[3];  // of float32, float64 and bfloat16
int64_t row_bytes;
PyObject *global_hooks;  // the forward hooks of all modules

int wanted_of(const Permit &permit, int64_t row) {
    return row < 0 ? NOTHING : row < permit.rows ? permit.wanted[row] : PYTHON;
}
bool is_of_this_thread(const Permit &permit) { return permit.thread == static_cast<int64_t>(PyThread_get_thread_ident()); }

int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

bool is_transformed_or_traced() {
    return !at::functorch::getDynamicLayerStack().empty() || torch::jit::tracer::getTracingState();
}

// The kernel of a tensor whose numbers can be read from memory; the conditions are those of `Library.accepts`.
Measure kernel_of(const Tensor &x) {
    if (!x.device().is_cpu() || x.layout() != at::kStrided || !x.unsafeGetTensorImpl()->has_storage() || x.is_neg()) return nullptr;
    const auto dtype = x.scalar_type();
    const int number = dtype == at::kFloat ? 0 : dtype == at::kDouble ? 1 : dtype == at::kBFloat16 ? 2 : -1;
    if (number < 0 || x.numel() <= 0 || !(x.is_contiguous() || x.is_contiguous(at::MemoryFormat::ChannelsLast))) return nullptr;
    // the storage may have been shrunk or freed
    const auto &storage = x.storage();
    if (!storage.data() || static_cast<size_t>((x.numel() + x.storage_offset()) * x.itemsize()) > storage.nbytes()) return nullptr;
    return kernels[number];
}

void measure(const Permit &permit, int64_t row, const Tensor &x, Measure kernel, int wanted) {
    kernel(x.const_data_ptr(), x.numel(), wanted, reinterpret_cast<char *>(*permit.table) + row * row_bytes);
}

// What is known of the gradient of one output of a forward.  It keeps the hook in Python, and the permits.
struct Gradient {
    const Permit *permit;
    int64_t row, forward;
    PyObject *kept;  // (hook, permits)
    ~Gradient() {
        if (!Py_IsInitialized()) return;
        pybind11::gil_scoped_acquire gil;
        Py_DECREF(kept);
    }
    bool record(const Tensor &x) const {
        Permit &given = *const_cast<Permit *>(permit);
        const int64_t began = now();
        const int wanted = wanted_of(given, row);
        if (!is_of_this_thread(given) || given.forward != forward || wanted < 0 || is_transformed_or_traced() ||
            torch::autograd::get_current_graph_task_id() != given.task) return false;
        const Measure kernel = kernel_of(x);
        if (!kernel) return false;
        measure(given, row, x, kernel, wanted);
        given.nanoseconds += now() - began;
        return true;
    }
};

[[noreturn]] void raise() {
    python_error error;
    error.persist();
    throw error;
}

// The hook of a tensor of autograd: the native function, or else the hook in Python.
struct GradientHook : torch::autograd::FunctionPreHook {
    std::shared_ptr<const Gradient> gradient;
    size_t number;
    GradientHook(std::shared_ptr<const Gradient> gradient, size_t number) : gradient(std::move(gradient)), number(number) {}

    variable_list operator()(const variable_list &gradients) override {
        const Tensor &x = gradients.at(number);
        if (!(x.defined() && gradient->record(x))) {
            pybind11::gil_scoped_acquire gil;
            THPObjectPtr value(THPVariable_Wrap(x));
            if (!value || !THPObjectPtr(PyObject_CallOneArg(hook(), value.get()))) raise();
        }
        return gradients;
    }
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &args) const override {
        pybind11::gil_scoped_acquire gil;
        Py_INCREF(hook());
        args.add_tensor_pre_hook(c10::SafePyObject(hook(), getPyInterpreter()), static_cast<int>(number));
    }
    PyObject *hook() const { return PyTuple_GET_ITEM(gradient->kept, 0); }
};

using Shared = std::shared_ptr<const Gradient>;

// Register the hook on a tensor; not on a leaf, and not behind a hook of the user's.
bool arm(const Tensor &x, const Shared &gradient) {
    const auto &node = x.grad_fn();
    if (!node || !torch::autograd::impl::hooks(x).empty()) return false;
    node->add_tensor_pre_hook(std::make_unique<GradientHook>(gradient, x.output_nr()));
    return true;
}

// What is known of the first output of a module.
struct Output {
    Permit *permit;
    int64_t row, gradient_row;
    PyObject *forward_hooks;  // of an `nn.Linear`; None for other modules
    PyObject *gradients;      // by the number of the forward, a capsule with the gradient, or None
    PyObject *kept;
};

// Register the hook for the gradient of an output, if there is one.  An output of `nn.Linear` may be a view of a tensor that nothing else
// has; then the hook is registered on that tensor, because an operation in place would cut off a hook of the view.
// A second forward hook of such a module may have replaced the output.
bool watch(const Output &output, const Tensor &x) {
    if (!x.requires_grad()) return true;
    const int64_t forward = output.permit->forward;
    if (forward < 0 || forward >= PyList_GET_SIZE(output.gradients)) return false;
    PyObject *const capsule = PyList_GET_ITEM(output.gradients, forward);
    if (capsule == Py_None) return false;
    const Shared &gradient = *static_cast<Shared *>(PyCapsule_GetPointer(capsule, nullptr));
    if (!x.is_view()) return arm(x, gradient);
    if (output.forward_hooks == Py_None || PyDict_Size(output.forward_hooks) != 1 || PyObject_Size(global_hooks)) return false;
    const Tensor base(x._base());
    return torch::autograd::impl::hooks(x).empty() && base.numel() == x.numel() && arm(base, gradient);
}

bool record(const Output &output, PyObject *object) {
    Permit &permit = *output.permit;
    const int wanted = wanted_of(permit, output.row), wanted_gradient = wanted_of(permit, output.gradient_row);
    if (!is_of_this_thread(permit) || wanted == PYTHON || wanted_gradient == PYTHON || !THPVariable_CheckExact(object) ||
        is_transformed_or_traced()) return false;
    const Tensor &x = THPVariable_Unpack(object);
    const Measure kernel = kernel_of(x);
    if (!kernel || (wanted_gradient != NOTHING && !watch(output, x))) return false;
    if (wanted == NOTHING) return true;
    PyThreadState *const state = x.numel() > LONG ? PyEval_SaveThread() : nullptr;
    measure(permit, output.row, x, kernel, wanted);
    if (state) PyEval_RestoreThread(state);
    return true;
}

PyObject *record_output(PyObject *capsule, PyObject *x) {
    const Output &output = *static_cast<Output *>(PyCapsule_GetPointer(capsule, nullptr));
    const int64_t began = now();
    bool is_done = false;
    try {
        is_done = record(output, x);
    } catch (...) {  // Python decides what to do with such a tensor
    }
    output.permit->nanoseconds += now() - began;
    return PyBool_FromLong(is_done);
}
PyMethodDef output_method = {"record_output", record_output, METH_O, nullptr};

}  // namespace

// Take the kernels, the size of a row, and the forward hooks of all modules, which Python keeps alive.
extern "C" void set_up(void *const *functions, int64_t size, PyObject *hooks) {
    for (int i = 0; i < 3; i++) kernels[i] = reinterpret_cast<Measure>(functions[i]);
    row_bytes = size;
    global_hooks = hooks;
}

// Return a function of one tensor that returns whether it was recorded; `kept` is what the other arguments point into.
extern "C" PyObject *output_function(int64_t permit, int64_t row, int64_t gradient_row, PyObject *forward_hooks, PyObject *gradients,
                                     PyObject *kept) {
    Py_INCREF(kept);
    auto *const made = new Output{reinterpret_cast<Permit *>(permit), row, gradient_row, forward_hooks, gradients, kept};
    THPObjectPtr capsule(PyCapsule_New(made, nullptr, [](PyObject *capsule) {
        auto *const output = static_cast<Output *>(PyCapsule_GetPointer(capsule, nullptr));
        Py_DECREF(output->kept);
        delete output;
    }));
    return PyCFunction_New(&output_method, capsule.get());
}

// Register the hook for the gradient of a tensor that is no view; return whether that was done.
extern "C" int watch_gradient(PyObject *x, PyObject *capsule) {
    try {
        return THPVariable_CheckExact(x) && arm(THPVariable_Unpack(x), *static_cast<Shared *>(PyCapsule_GetPointer(capsule, nullptr)));
    } catch (...) {
        return false;
    }
}

// Return a capsule with what is known of a gradient; `kept` is the hook in Python, and the permits.
extern "C" PyObject *gradient_of(int64_t permit, int64_t row, int64_t forward, PyObject *kept) {
    Py_INCREF(kept);
    auto *const made = new Shared(new Gradient{reinterpret_cast<const Permit *>(permit), row, forward, kept});
    return PyCapsule_New(made, nullptr, [](PyObject *capsule) {
        delete static_cast<Shared *>(PyCapsule_GetPointer(capsule, nullptr));
    });
}
