/* Copies rows of bytes and parses length prefixes without the interpreter's lock and without Python for each row.

   `rows.py` checks types and raises the errors; `copy` and `parse` there are the same functions in Python. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* A thread that gives the lock away may wait 5 ms to get it back, so what takes less than about 20 us keeps it. */
#define FEW_ROWS 256
#define FEW_BYTES (64 << 10)

/* How many rows ahead the source is prefetched: a row at a random place is a cache miss. */
#define AHEAD 16

#if defined(__GNUC__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

/* Item i of an array of int64, which may be unaligned. */
static inline int64_t
item(const Py_buffer *array, Py_ssize_t i)
{
    int64_t value;
    memcpy(&value, (const char *)array->buf + 8 * i, 8);
    return value;
}

typedef struct {
    Py_buffer source, starts, sizes, target, at; /* `sizes`: one for each row, or one for all; `at.buf` may be NULL */
    Py_buffer padding;                           /* for the gaps of ascending rows in [first, stop), unless it is empty */
    Py_ssize_t first, stop;
} Rows;

static inline int64_t
size_of(const Rows *rows, Py_ssize_t i)
{
    return item(&rows->sizes, rows->sizes.len == 8 ? 0 : i);
}

/* Return the first row out of bounds, `count` for the padding after the last one, or -1; *total becomes the bytes of
   all rows. */
static Py_ssize_t
check(const Rows *rows, Py_ssize_t count, int64_t *total)
{
    const int64_t source = rows->source.len, target = rows->target.len, padding = rows->padding.len;
    int64_t next = 0; /* the sum may exceed int64 only if rows overlap in the target, where it saturates */
    int64_t end = rows->first;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t start = item(&rows->starts, i), size = size_of(rows, i);
        int64_t at = rows->at.buf ? item(&rows->at, i) : next;
        /* no sum that may overflow */
        if (start < 0 || size < 0 || at < 0 || size > source || start > source - size || size > target ||
            at > target - size)
            return i;
        if (padding && (end < 0 || at < end || at - end > padding))
            return i;
        end = at + size;
        next = size > INT64_MAX - next ? INT64_MAX : next + size;
    }
    if (padding && (end < 0 || rows->stop > target || rows->stop < end || rows->stop - end > padding))
        return count;
    *total = next;
    return -1;
}

/* Rows may overlap in the source and in the target, and the two may share memory: rows are copied in their order. */
static void
copy_checked(const Rows *rows, Py_ssize_t count)
{
    const char *source = rows->source.buf;
    const size_t padding = (size_t)rows->padding.len;
    char *target = rows->target.buf;
    int64_t next = 0, end = rows->first;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t size = size_of(rows, i), at = rows->at.buf ? item(&rows->at, i) : next;
        if (i + AHEAD < count)
            PREFETCH(source + item(&rows->starts, i + AHEAD));
        if (padding)
            memcpy(target + end, rows->padding.buf, (size_t)(at - end));
        memmove(target + at, source + item(&rows->starts, i), (size_t)size);
        end = at + size;
        next += size;
    }
    if (padding)
        memcpy(target + end, rows->padding.buf, (size_t)(rows->stop - end));
}

static PyObject *
copy(PyObject *Py_UNUSED(module), PyObject *args)
{
    Rows rows = {0};
    if (!PyArg_ParseTuple(args, "y*y*y*w*z*|y*nn", &rows.source, &rows.starts, &rows.sizes, &rows.target, &rows.at,
                          &rows.padding, &rows.first, &rows.stop))
        return NULL;
    PyObject *result = NULL;
    Py_ssize_t count = rows.starts.len / 8;
    if (rows.starts.len % 8 || (rows.sizes.len != 8 && rows.sizes.len != rows.starts.len) ||
        (rows.at.buf && rows.at.len != rows.starts.len)) {
        PyErr_SetString(PyExc_ValueError, "starts, sizes and at differ in length");
    } else {
        int64_t total = 0;
        PyThreadState *released = count < FEW_ROWS ? NULL : PyEval_SaveThread();
        Py_ssize_t bad = check(&rows, count, &total);
        if (bad < 0) {
            if (!released && total >= FEW_BYTES)
                released = PyEval_SaveThread();
            copy_checked(&rows, count);
        }
        if (released)
            PyEval_RestoreThread(released);
        result = PyLong_FromSsize_t(bad);
    }
    PyBuffer_Release(&rows.source);
    PyBuffer_Release(&rows.starts);
    PyBuffer_Release(&rows.sizes);
    PyBuffer_Release(&rows.target);
    if (rows.at.obj)
        PyBuffer_Release(&rows.at);
    PyBuffer_Release(&rows.padding);
    return result;
}

static PyObject *
parse(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data, edges;
    if (!PyArg_ParseTuple(args, "y*w*", &data, &edges))
        return NULL;
    const unsigned char *bytes = data.buf;
    const Py_ssize_t count = edges.len / 8 - 1;
    Py_ssize_t done = 0;
    int64_t stop = 4; /* at most one length beyond the data, so it does not overflow */
    PyThreadState *released = count < FEW_ROWS ? NULL : PyEval_SaveThread();
    for (; done <= count; done++) {
        memcpy((char *)edges.buf + 8 * done, &stop, 8);
        if (done == count || stop > data.len - 4)
            break;
        const unsigned char *p = bytes + stop;
        stop += 4 + (int64_t)(p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
    }
    if (released)
        PyEval_RestoreThread(released);
    PyBuffer_Release(&data);
    PyBuffer_Release(&edges);
    return PyLong_FromSsize_t(done);
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "copy(source, starts, sizes, target, at, padding, first, stop): see rows.py"},
    {"parse", parse, METH_VARARGS, "parse(data, edges): see rows.py"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* calls share nothing but what their caller gives them */
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_rows", NULL, 0, methods, slots, NULL, NULL, NULL};

PyMODINIT_FUNC
PyInit__rows(void)
{
    return PyModuleDef_Init(&definition);
}
