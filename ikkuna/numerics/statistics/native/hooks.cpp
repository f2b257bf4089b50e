
// Native functions that hooks of modules and of gradients call first.
//
// A hook in Python decides what is measured, and writes the result of its decision into a permit.  Until the permit ends, the
// functions below repeat the decision for the hooks that follow.  Whatever is not covered by the permit is left to Python.

#ifdef __ELF__
#include <ctime>

extern "C" {
struct PyMethodDef {
    const char *name;
    PyObject *(*function)(PyObject *, PyObject *);
    int flags;
    const char *doc;
};
WEAK PyObject *PyCFunction_NewEx(PyMethodDef *, PyObject *, PyObject *);
WEAK PyObject *PyTuple_GetItem(PyObject *, intptr_t);
WEAK PyObject *PyLong_FromLong(long);
WEAK PyObject *PyObject_CallNoArgs(PyObject *);
WEAK int PyObject_SetAttr(PyObject *, PyObject *, PyObject *);
WEAK int PyObject_SetItem(PyObject *, PyObject *, PyObject *);
WEAK PyObject *PyObject_GetItem(PyObject *, PyObject *);
WEAK int PyList_SetItem(PyObject *, intptr_t, PyObject *);
WEAK intptr_t PyObject_Size(PyObject *);
WEAK unsigned long PyThread_get_thread_ident();
}

namespace {

// What may be measured without Python; `hook_functions.py` has the same order.
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

int wanted_of(const Permit &permit, int64_t row) {
    return row < 0 ? NOTHING : row < permit.rows ? permit.wanted[row] : PYTHON;
}
void *address_of(const Permit &permit, int64_t row) {
    return reinterpret_cast<Record *>(*permit.table) + row;
}

int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

// The numbers of which the functions below are made.
int64_t item(PyObject *numbers, int i) { return PyLong_AsLongLong(PyTuple_GetItem(numbers, i)); }

bool returns_none(PyObject *function) { return Reference(PyObject_CallNoArgs(function)).is(o->none); }
bool is_transformed() {
    if (!torch->transforms) return !returns_none(o->function_transforms);
    void *const *const stack = torch->transforms();
    return stack[0] != stack[1];
}
bool is_traced() { return torch->tracing_state ? *torch->tracing_state() != nullptr : !returns_none(o->tracing_state); }
int64_t graph_task() { return torch->graph_task ? torch->graph_task() : Reference(PyObject_CallNoArgs(o->graph_task)).number(); }

int64_t references(PyObject *x) { return Reference(PyObject_Vectorcall(o->getrefcount, &x, 1, nullptr)).number(); }
int64_t alone;  // the references of an object that only a list has

// As `Tensor.register_hook`, without a handle, and with the dictionary of an earlier step if that is not in use any more.
// A dictionary that has another hook, or that belongs to another graph, is replaced by a new one.
bool arm(PyObject *x, PyObject *node, PyObject *dictionaries, int64_t number) {
    PyObject *known = PyList_GetItem(dictionaries, number);
    if (references(known) != alone || PyObject_Size(known) != 1) {
        const Reference hook(PyObject_GetItem(known, o->hook_key));
        PyObject *made = hook.object ? PyObject_CallNoArgs(o->ordered_dict) : nullptr;
        if (!made || PyObject_SetItem(made, o->hook_key, hook.object) || PyList_SetItem(dictionaries, number, made)) {
            PyErr_Clear();
            return false;
        }
        known = made;
    }
    if (PyObject_SetAttr(x, o->backward_hooks, known)) {
        PyErr_Clear();
        return false;
    }
    PyObject *const arguments[] = {node, x};
    return Reference(PyObject_VectorcallMethod(o->register_hook_dict, arguments, 2, nullptr)).object;
}

// Whether a tensor has no hook yet.
bool is_unhooked(PyObject *x) { return Reference(attribute(x, o->backward_hooks)).is(o->none); }

// Whether a tensor has as many elements as another one.
bool is_as_large(PyObject *x, int64_t n) {
    View view;
    return view_of(x, view) && view.n == n;
}

// Register the hook for the gradient of an output, if there is one.  An output of `nn.Linear` may be a view of a tensor that nothing else
// has; then the hook is registered on that tensor, because an operation in place would cut off a hook of the view.
// `forward_hooks` are those of such a module, and None for others; a second one may have replaced the output.
bool watch(PyObject *x, int64_t n, PyObject *dictionaries, int64_t number, PyObject *forward_hooks) {
    const Reference node(attribute(x, o->grad_fn));
    if (node.is(o->none)) return Reference(attribute(x, o->requires_grad)).is_false();
    if (!node.object || number >= PyObject_Size(dictionaries) || PyList_GetItem(dictionaries, number) == o->none) return false;
    if (!is_unhooked(x)) return false;
    const Reference base(attribute(x, o->base));
    if (base.is(o->none)) return arm(x, node.object, dictionaries, number);
    if (forward_hooks == o->none || PyObject_Size(forward_hooks) != 1 || PyObject_Size(o->global_hooks)) return false;
    if (!base.object || !is_unhooked(base.object) || !is_as_large(base.object, n)) return false;
    const Reference node_of_base(attribute(base.object, o->grad_fn));
    return node_of_base.object && !node_of_base.is(o->none) && arm(base.object, node_of_base.object, dictionaries, number);
}

// numbers: address of the permit, row of the output, row of its gradient, the forward hooks of an `nn.Linear` or None, and the
// dictionary with the hook of the gradient by the number of the forward
bool record_output(const Permit &permit, PyObject *numbers, PyObject *x) {
    const int64_t row = item(numbers, 1), gradient = item(numbers, 2);
    const int wanted = wanted_of(permit, row), wanted_gradient = wanted_of(permit, gradient);
    if (wanted == PYTHON || wanted_gradient == PYTHON || is_transformed() || is_traced()) return false;
    View view;
    if (!view_of(x, view) || !is_plain(x)) return false;
    if (wanted_gradient != NOTHING &&
        !watch(x, view.n, PyTuple_GetItem(numbers, 4), permit.forward, PyTuple_GetItem(numbers, 3))) return false;
    if (wanted != NOTHING) measure_view(view, wanted, address_of(permit, row));
    return true;
}

// numbers: address of the permit, row, number of the forward
bool record_gradient(const Permit &permit, PyObject *numbers, PyObject *x) {
    if (permit.forward != item(numbers, 2)) return false;
    const int64_t row = item(numbers, 1);
    const int wanted = wanted_of(permit, row);
    if (wanted < 0 || is_transformed() || is_traced() || graph_task() != permit.task) return false;
    View view;
    if (!view_of(x, view) || !is_plain(x)) return false;
    measure_view(view, wanted, address_of(permit, row));
    return true;
}

template <bool (*record)(const Permit &, PyObject *, PyObject *)>
PyObject *timed(PyObject *numbers, PyObject *x) {
    Permit *permit = reinterpret_cast<Permit *>(item(numbers, 0));
    if (permit->thread != static_cast<int64_t>(PyThread_get_thread_ident())) return PyLong_FromLong(0);
    const int64_t began = now();
    const bool is_done = record(*permit, numbers, x);
    permit->nanoseconds += now() - began;
    return PyLong_FromLong(is_done);
}

constexpr int ONE_ARGUMENT = 8;  // METH_O
PyMethodDef output_method = {"record_output", timed<record_output>, ONE_ARGUMENT, nullptr};
PyMethodDef gradient_method = {"record_gradient", timed<record_gradient>, ONE_ARGUMENT, nullptr};

}  // namespace

// Whether the interpreter has the functions of this part; `list` has one object that nothing else has.
extern "C" int has_hook_functions(PyObject *list) {
    alone = references(PyList_GetItem(list, 0));
    return PyObject_GetItem && PyList_SetItem && PyCFunction_NewEx && PyTuple_GetItem && PyLong_FromLong && PyObject_CallNoArgs && PyObject_SetAttr &&
           PyObject_SetItem && PyObject_Size && PyThread_get_thread_ident;
}

// Return a function of one tensor that returns whether it was recorded.
extern "C" PyObject *output_function(PyObject *numbers) { return PyCFunction_NewEx(&output_method, numbers, nullptr); }
extern "C" PyObject *gradient_function(PyObject *numbers) { return PyCFunction_NewEx(&gradient_method, numbers, nullptr); }
#endif
