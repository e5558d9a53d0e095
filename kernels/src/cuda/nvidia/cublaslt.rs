//! cuBLASLt, looked up at run time: large products as NVIDIA's own library makes them.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{from_ref, null_mut};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;
use libloading::Library;

use super::context::Context;
use super::library::{self, symbol};
use crate::cuda::driver::{DevicePointer, Product, ProductOutput, Products, StreamHandle};
use crate::cuda::table::HOPPER;
use crate::cuda::{DeviceFacts, DriverError};

/// Its names, of CUDA 13 and 12.
const NAMES: [&str; 2] = ["libcublasLt.so.13", "libcublasLt.so.12"];
/// Bytes at whose multiples all operands begin.
const ALIGNMENT: u32 = 16;

// Of `cublas_api.h`, `cublasLt.h` and `library_types.h`.
const SUCCESS: c_int = 0;
const TRANSPOSED: c_int = 1;
const SUMS_IN_F32: c_int = 68;
const F32: c_int = 0;
const BF16: c_int = 14;
const DESCRIPTION_TRANSPOSES_A: c_int = 3;
const PREFERENCE_MOST_WORKSPACE: c_int = 1;
const PREFERENCE_ALIGNMENTS: [c_int; 4] = [5, 6, 7, 8];

/// `cublasLtMatmulHeuristicResult_t`: a way to multiply.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Found {
    algorithm: [u64; 8],
    workspace_bytes: usize,
    state: c_int,
    waves: f32,
    reserved: [c_int; 4],
}

type Create<A> = unsafe extern "C" fn(*mut Handle, A, A) -> c_int;
type Destroy = unsafe extern "C" fn(Handle) -> c_int;
type SetAttribute = unsafe extern "C" fn(Handle, c_int, *const c_void, usize) -> c_int;
/// An object of the library.
type Handle = *mut c_void;

/// The functions that are used, as `cublasLt.h` declares them.
struct CublasLt {
    create: unsafe extern "C" fn(*mut Handle) -> c_int,
    destroy: Destroy,
    create_description: Create<c_int>,
    destroy_description: Destroy,
    set_description: SetAttribute,
    create_layout: unsafe extern "C" fn(*mut Handle, c_int, u64, u64, i64) -> c_int,
    destroy_layout: Destroy,
    create_preference: unsafe extern "C" fn(*mut Handle) -> c_int,
    destroy_preference: Destroy,
    set_preference: SetAttribute,
    #[allow(clippy::type_complexity)] // the library's
    find: unsafe extern "C" fn(
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        Handle,
        c_int,
        *mut Found,
        *mut c_int,
    ) -> c_int,
    #[allow(clippy::type_complexity)] // the library's
    multiply: unsafe extern "C" fn(
        Handle,
        Handle,
        *const f32,
        u64,
        Handle,
        u64,
        Handle,
        *const f32,
        u64,
        Handle,
        u64,
        Handle,
        *const [u64; 8],
        u64,
        usize,
        sys::CUstream,
    ) -> c_int,
    status_name: unsafe extern "C" fn(c_int) -> *const c_char,
    version: usize,
    /// Stays while the functions may be called.
    _library: Library,
}

impl CublasLt {
    /// The library of this process, found once.
    fn find() -> Result<&'static CublasLt, DriverError> {
        static FOUND: OnceLock<Result<CublasLt, DriverError>> = OnceLock::new();
        FOUND.get_or_init(|| CublasLt::open(&NAMES)).as_ref().map_err(Clone::clone)
    }

    /// The first of these libraries that there is.
    fn open(names: &[&str]) -> Result<CublasLt, DriverError> {
        // SAFETY: what loading cuBLASLt runs sets up its own state alone; the symbols are its, whose types are those of their
        // fields, where addresses of the device are numbers; the library stays with them.
        unsafe {
            let library = library::open(names)?;
            let version = symbol::<unsafe extern "C" fn() -> usize>(&library, c"cublasLtGetVersion")?();
            Ok(CublasLt {
                create: symbol(&library, c"cublasLtCreate")?,
                destroy: symbol(&library, c"cublasLtDestroy")?,
                create_description: symbol(&library, c"cublasLtMatmulDescCreate")?,
                destroy_description: symbol(&library, c"cublasLtMatmulDescDestroy")?,
                set_description: symbol(&library, c"cublasLtMatmulDescSetAttribute")?,
                create_layout: symbol(&library, c"cublasLtMatrixLayoutCreate")?,
                destroy_layout: symbol(&library, c"cublasLtMatrixLayoutDestroy")?,
                create_preference: symbol(&library, c"cublasLtMatmulPreferenceCreate")?,
                destroy_preference: symbol(&library, c"cublasLtMatmulPreferenceDestroy")?,
                set_preference: symbol(&library, c"cublasLtMatmulPreferenceSetAttribute")?,
                find: symbol(&library, c"cublasLtMatmulAlgoGetHeuristic")?,
                multiply: symbol(&library, c"cublasLtMatmul")?,
                status_name: symbol(&library, c"cublasLtGetStatusName")?,
                version,
                _library: library,
            })
        }
    }

    fn name(&self) -> String {
        format!("cuBLASLt {}.{}.{}", self.version / 10_000, self.version / 100 % 100, self.version % 100)
    }

    /// An error unless it succeeded.
    fn call(&self, name: &'static str, result: c_int) -> Result<(), DriverError> {
        if result == SUCCESS {
            return Ok(());
        }
        // SAFETY: the library gives a text that lives as long as the program, for any number.
        let words = unsafe { CStr::from_ptr((self.status_name)(result)) };
        Err(DriverError::refused(name, format!("{}: {}", self.name(), words.to_string_lossy())))
    }
}

/// An object of the library, ended with this.
struct Owned {
    handle: Handle,
    destroy: Destroy,
}

// SAFETY: descriptions are plain data to the library, which reads them from whatever thread calls it.
unsafe impl Send for Owned {}

impl Owned {
    /// What `create` writes.
    fn new(
        library: &CublasLt,
        name: &'static str,
        destroy: Destroy,
        create: impl FnOnce(*mut Handle) -> c_int,
    ) -> Result<Owned, DriverError> {
        let mut handle = null_mut();
        library.call(name, create(&mut handle))?;
        Ok(Owned { handle, destroy })
    }

    fn set<T>(&self, library: &CublasLt, set: SetAttribute, attribute: c_int, value: &T) -> Result<(), DriverError> {
        // SAFETY: the attribute is of `T`, which is read before the call returns.
        let result = unsafe { set(self.handle, attribute, from_ref(value).cast(), size_of::<T>()) };
        library.call("cublasLt…SetAttribute", result)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody uses it any more; there is nobody to tell.
        unsafe { (self.destroy)(self.handle) };
    }
}

/// How a product is made: matrices as the library sees them, column after column.
struct Plan {
    description: Owned,
    weights: Owned,
    input: Owned,
    out: Owned,
    found: Found,
}

/// The library on one device.
pub(super) struct LargeProducts {
    library: &'static CublasLt,
    context: Arc<Context>,
    handle: Handle,
    workspace_bytes: usize,
    /// None where the library has no way.
    plans: Mutex<HashMap<Product, Option<Plan>>>,
}

// SAFETY: the library's handle may be used from any thread.
unsafe impl Send for LargeProducts {}
// SAFETY: as above; plans are behind a lock.
unsafe impl Sync for LargeProducts {}

impl LargeProducts {
    /// On a device, by the library of this machine.
    pub fn on(facts: &DeviceFacts, context: &Arc<Context>) -> Result<Arc<LargeProducts>, DriverError> {
        context.bind()?;
        let (library, mut handle) = (CublasLt::find()?, null_mut());
        // SAFETY: the place is valid for the write.
        library.call("cublasLtCreate", unsafe { (library.create)(&mut handle) })?;
        // As much as NVIDIA's own programs give it.
        let workspace_bytes = if facts.capability == HOPPER { 32 << 20 } else { 4 << 20 };
        let context = Arc::clone(context);
        Ok(Arc::new(LargeProducts { library, context, handle, workspace_bytes, plans: Mutex::default() }))
    }

    /// Rows that follow one another are columns to the library: it multiplies `weights`, transposed, with `input`.
    fn planned(&self, product: &Product) -> Result<Option<Plan>, DriverError> {
        let Product { tokens, rows, cols, out } = *product;
        let library = self.library;
        // SAFETY: the places are valid for the writes.
        let create = |handle| unsafe { (library.create_description)(handle, SUMS_IN_F32, F32) };
        let description = Owned::new(library, "cublasLtMatmulDescCreate", library.destroy_description, create)?;
        description.set(library, library.set_description, DESCRIPTION_TRANSPOSES_A, &TRANSPOSED)?;
        let (weights, input) = (self.layout(BF16, cols, rows)?, self.layout(BF16, cols, tokens)?);
        let out = self.layout(if out == ProductOutput::Bf16 { BF16 } else { F32 }, rows, tokens)?;
        let preference = self.preference()?;
        let (mut found, mut count) = (Found::default(), 0);
        // SAFETY: all of these were just made, and the places are valid for the writes of one result.
        let result = unsafe {
            let (weights, input, out) = (weights.handle, input.handle, out.handle);
            let (description, preference) = (description.handle, preference.handle);
            (library.find)(self.handle, description, weights, input, out, out, preference, 1, &mut found, &mut count)
        };
        let has_way = result == SUCCESS && count == 1 && found.state == SUCCESS;
        Ok(has_way.then_some(Plan { description, weights, input, out, found }))
    }

    /// Columns one behind the other.
    fn layout(&self, kind: c_int, rows: usize, cols: usize) -> Result<Owned, DriverError> {
        let library = self.library;
        // SAFETY: the place is valid for the write.
        let create = |handle| unsafe { (library.create_layout)(handle, kind, rows as u64, cols as u64, rows as i64) };
        Owned::new(library, "cublasLtMatrixLayoutCreate", library.destroy_layout, create)
    }

    fn preference(&self) -> Result<Owned, DriverError> {
        let library = self.library;
        // SAFETY: the place is valid for the write.
        let create = |handle| unsafe { (library.create_preference)(handle) };
        let preference = Owned::new(library, "cublasLtMatmulPreferenceCreate", library.destroy_preference, create)?;
        preference.set(library, library.set_preference, PREFERENCE_MOST_WORKSPACE, &(self.workspace_bytes as u64))?;
        for alignment in PREFERENCE_ALIGNMENTS {
            preference.set(library, library.set_preference, alignment, &ALIGNMENT)?;
        }
        Ok(preference)
    }
}

impl Products for LargeProducts {
    fn name(&self) -> String {
        self.library.name()
    }

    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    fn plan(&self, product: &Product) -> Result<bool, DriverError> {
        self.context.bind()?;
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        match plans.entry(*product) {
            Entry::Occupied(plan) => Ok(plan.get().is_some()),
            Entry::Vacant(place) => Ok(place.insert(self.planned(product)?).is_some()),
        }
    }

    fn multiply(
        &self,
        product: &Product,
        [weights, input, out]: [DevicePointer; 3],
        workspace: DevicePointer,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        const CALL: &str = "cublasLtMatmul";
        self.context.bind()?;
        let plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Some(plan)) = plans.get(product) else { return Err(DriverError::refused(CALL, "it is not planned")) };
        let (one, kept) = (1.0, if product.out == ProductOutput::AddTo { 1.0 } else { 0.0 });
        // SAFETY: the plan is this product's, for operands that begin where these do; the numbers are read before the call
        // returns; the workspace is as large as was asked for, and one stream's.
        self.library.call(CALL, unsafe {
            (self.library.multiply)(
                self.handle,
                plan.description.handle,
                &one,
                weights.0,
                plan.weights.handle,
                input.0,
                plan.input.handle,
                &kept,
                out.0,
                plan.out.handle,
                out.0,
                plan.out.handle,
                &plan.found.algorithm,
                workspace.0,
                self.workspace_bytes,
                stream.0 as sys::CUstream,
            )
        })
    }
}

impl Drop for LargeProducts {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `on`; its products' streams have ended.
            unsafe { (self.library.destroy)(self.handle) };
        }
    }
}

impl std::fmt::Debug for LargeProducts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LargeProducts({})", self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_or_another_is_refused_by_name() {
        let refusal = |names: &[&str]| CublasLt::open(names).map(|_| ()).unwrap_err().to_string();
        assert!(refusal(&["libnone.so.13"]).contains("libnone.so.13"));
        let other = refusal(&["libm.so.6"]);
        assert!(other.contains("cublasLtGetVersion"), "{other}");
    }
}
