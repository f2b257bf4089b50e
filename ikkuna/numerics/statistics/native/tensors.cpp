
// ---- the part that reads tensors through their Python objects --------------------------------------------------------
//
// One call checks and measures a tensor, or a list of tensors.  The conditions are those of `Library.accepts`; whatever does not
// meet them is left to Python.  Only functions of Python's interface that are the same in all its versions are used.  They are
// declared here, because the headers of Python are often not installed, and they are weak: where the interpreter does not export
// them, `set_up` returns 0, and the rest of the library works.

#ifdef __ELF__
#include <cstddef>

#define WEAK __attribute__((weak))
extern "C" {
struct PyObject;
struct PyThreadState;
WEAK PyObject *PyObject_Type(PyObject *);
WEAK PyObject *PyObject_GetAttr(PyObject *, PyObject *);
WEAK PyObject *PyObject_Call(PyObject *, PyObject *, PyObject *);
WEAK PyObject *PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);
WEAK PyObject *PyObject_VectorcallMethod(PyObject *, PyObject *const *, size_t, PyObject *);
WEAK int PyObject_IsTrue(PyObject *);
WEAK int PyObject_RichCompareBool(PyObject *, PyObject *, int);
WEAK PyObject *PyList_GetItem(PyObject *, intptr_t);
WEAK long long PyLong_AsLongLong(PyObject *);
WEAK PyObject *PyErr_Occurred();
WEAK void PyErr_Clear();
WEAK void Py_DecRef(PyObject *);
WEAK PyThreadState *PyEval_SaveThread();
WEAK void PyEval_RestoreThread(PyThreadState *);
}

namespace {

// What Python passes to `set_up`, in this order; it keeps these objects alive.
struct Objects {
    PyObject *tensor, *parameter, *float32, *float64, *bfloat16, *strided, *is_transformed, *nothing, *channels_last;
    PyObject *dtype, *is_cpu, *layout, *is_nested, *is_neg, *data_ptr, *numel, *itemsize, *storage_offset, *untyped_storage,
        *nbytes, *is_contiguous, *dim, *shape;
};
const Objects *o;

constexpr int64_t MOST = 1 << 19;   // more are measured by several threads
constexpr int64_t LONG = 1 << 15;   // other threads of Python may run meanwhile

// A reference that is released at the end of its scope.
struct Reference {
    PyObject *object;
    explicit Reference(PyObject *object) : object(object) {}
    Reference(const Reference &) = delete;
    ~Reference() {
        if (object) Py_DecRef(object);
        else PyErr_Clear();
    }
    bool is(PyObject *other) const { return object && object == other; }
    bool is_true() const { return object && PyObject_IsTrue(object) == 1; }
    bool is_false() const { return object && PyObject_IsTrue(object) == 0; }
    int64_t number() const {  // -1 for an error
        if (!object) return -1;
        const int64_t found = PyLong_AsLongLong(object);
        if (found == -1 && PyErr_Occurred()) PyErr_Clear();
        return found;
    }
};

PyObject *attribute(PyObject *x, PyObject *name) { return PyObject_GetAttr(x, name); }
PyObject *call(PyObject *x, PyObject *name) { return PyObject_VectorcallMethod(name, &x, 1, nullptr); }

enum Order { NONE, CONTIGUOUS, CHANNELS_LAST };

struct View {
    void *data;
    int64_t n;
    int dtype;
    Order order;
};

Order order_of(PyObject *x) {
    if (Reference(call(x, o->is_contiguous)).is_true()) return CONTIGUOUS;
    if (Reference(call(x, o->dim)).number() != 4) return NONE;
    const Reference method(attribute(x, o->is_contiguous));
    if (!method.object) return NONE;
    return Reference(PyObject_Call(method.object, o->nothing, o->channels_last)).is_true() ? CHANNELS_LAST : NONE;
}

// Whether the storage has the bytes of the tensor: it may have been shrunk or freed.
bool is_stored(PyObject *x, int64_t n) {
    const int64_t size = Reference(attribute(x, o->itemsize)).number();
    const int64_t offset = Reference(call(x, o->storage_offset)).number();
    const Reference storage(call(x, o->untyped_storage));
    if (!storage.object || size < 0 || offset < 0) return false;
    return (n + offset) * size <= Reference(call(storage.object, o->nbytes)).number();
}

int dtype_of(PyObject *x) {
    const Reference dtype(attribute(x, o->dtype));
    return dtype.is(o->float32) ? 0 : dtype.is(o->float64) ? 1 : dtype.is(o->bfloat16) ? 2 : -1;
}

void *data_of(PyObject *x) {
    const int64_t data = Reference(call(x, o->data_ptr)).number();
    return data == -1 ? nullptr : reinterpret_cast<void *>(data);
}

bool is_on_host(PyObject *x) {
    const Reference type(PyObject_Type(x));
    return (type.is(o->tensor) || type.is(o->parameter)) && Reference(attribute(x, o->is_cpu)).is_true();
}

// What does not change while the same object has the same memory.
bool is_plain(PyObject *x) {
    if (!is_on_host(x) || !Reference(attribute(x, o->layout)).is(o->strided)) return false;
    if (!Reference(attribute(x, o->is_nested)).is_false() || !Reference(call(x, o->is_neg)).is_false()) return false;
    return Reference(PyObject_Vectorcall(o->is_transformed, &x, 1, nullptr)).is_false();
}

// What can change at any time: ``x.data = y`` replaces the memory, and a storage can be resized.
bool view_of(PyObject *x, View &view) {
    view.dtype = dtype_of(x);
    if (view.dtype < 0) return false;
    view.n = Reference(call(x, o->numel)).number();
    if (view.n <= 0 || view.n > MOST) return false;
    view.data = data_of(x);
    if (!view.data || !is_stored(x, view.n)) return false;
    view.order = order_of(x);
    return view.order != NONE;
}

// A tensor that was found to be plain, and where its memory was then.  The object may be gone, and another may have its address.
struct Known {
    PyObject *x;
    void *data;
};

bool look(PyObject *x, View &view, Known *known) {
    if (!known) return is_plain(x) && view_of(x, view);
    if (known->x == x && is_on_host(x) && view_of(x, view) && view.data == known->data) return true;
    const bool found = is_plain(x) && view_of(x, view);
    *known = Known{found ? x : nullptr, found ? view.data : nullptr};
    return found;
}

struct Unlocked {  // lets other threads of Python run, if it takes long enough
    PyThreadState *state;
    explicit Unlocked(int64_t n) : state(n > LONG ? PyEval_SaveThread() : nullptr) {}
    ~Unlocked() {
        if (state) PyEval_RestoreThread(state);
    }
};

void measure_view(const View &view, int wanted, void *row) {
    const Unlocked unlocked(view.n);
    if (view.dtype == 0) measure_float32(view.data, view.n, wanted, row);
    else if (view.dtype == 1) measure_float64(view.data, view.n, wanted, row);
    else measure_bfloat16(view.data, view.n, wanted, row);
}

}  // namespace

// Take the objects that Python keeps alive; return whether the interpreter has all functions.
extern "C" int set_up(const void *objects) {
    o = static_cast<const Objects *>(objects);
    return PyObject_Type && PyObject_GetAttr && PyObject_Call && PyObject_Vectorcall && PyObject_VectorcallMethod &&
           PyObject_IsTrue && PyObject_RichCompareBool && PyList_GetItem && PyLong_AsLongLong && PyErr_Occurred &&
           PyErr_Clear && Py_DecRef && PyEval_SaveThread && PyEval_RestoreThread;
}

// Add the statistics of a tensor to a row; return whether that was done.
extern "C" int measure_tensor(PyObject *x, int wanted, void *row) {
    View view;
    if (!look(x, view, nullptr)) return 0;
    measure_view(view, wanted, row);
    return 1;
}

// The same for a list of tensors and the rows at these addresses; `done` says for each tensor whether that was done.
// `known`, if it is not null, is the memory of this function for the next call with the same tensors, all zeros at first.
extern "C" void measure_tensors(PyObject *tensors, int64_t count, const int32_t *wanted, void *const *rows, void *known,
                                uint8_t *done) {
    Known *const each = static_cast<Known *>(known);
    for (int64_t i = 0; i < count; i++) {
        View view;
        done[i] = look(PyList_GetItem(tensors, i), view, each ? each + i : nullptr);
        if (done[i]) measure_view(view, wanted[i], rows[i]);
    }
}

static bool have_equal_shapes(PyObject *x, PyObject *y) {
    const Reference a(attribute(x, o->shape)), b(attribute(y, o->shape));
    if (!a.object || !b.object) return false;
    const int same = PyObject_RichCompareBool(a.object, b.object, 2);  // Py_EQ
    if (same < 0) PyErr_Clear();
    return same == 1;
}

// The same for the differences of tensors and copies that were made of them.
extern "C" void measure_differences(PyObject *tensors, PyObject *copies, int64_t count, const int32_t *wanted,
                                    void *const *rows, void *known, uint8_t *done) {
    Known *const each = static_cast<Known *>(known);
    for (int64_t i = 0; i < count; i++) {
        View view;
        PyObject *x = PyList_GetItem(tensors, i), *y = PyList_GetItem(copies, i);
        done[i] = look(x, view, each ? each + i : nullptr) && view.dtype < 2 && dtype_of(y) == view.dtype &&
                  have_equal_shapes(x, y) && order_of(y) == view.order;
        if (!done[i]) continue;
        const void *before = data_of(y);
        const Unlocked unlocked(view.n);
        if (view.dtype == 0) measure_difference_float32(view.data, before, view.n, wanted[i], rows[i]);
        else measure_difference_float64(view.data, before, view.n, wanted[i], rows[i]);
    }
}
#endif
