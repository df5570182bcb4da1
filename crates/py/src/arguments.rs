//! The macro that declares a wrapper for each kind of argument, and the wrappers that several files read.
//!
//! Extracting an argument checks nothing, because the contract fixes the order of the checks across the
//! arguments of a call (§7, §9.1). A method checks each argument when its turn comes. `name` is its name in
//! errors.

use llm_datadist_core::bindings::validate;
use llm_datadist_core::bindings::{CacheKey, Role};
use llm_datadist_core::{CacheDesc, CacheKind};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyList};

use crate::convert::{self, Any, Width, any_int, only_support, shown};
use crate::error::{invalid, raise};
use crate::python_types::PythonTypes;

/// Declares wrappers of arguments. Only the file that declares a wrapper can access the object in it; all other
/// files call its methods.
macro_rules! arguments {
    ($($(#[$doc:meta])* $name:ident;)*) => {
        $($(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name<'a, 'py>(Borrowed<'a, 'py, PyAny>);

        impl<'a, 'py> FromPyObject<'a, 'py> for $name<'a, 'py> {
            type Error = std::convert::Infallible;

            fn extract(given: Borrowed<'a, 'py, PyAny>) -> std::result::Result<Self, Self::Error> {
                Ok($name(given))
            }
        }

        impl<'py> $name<'_, 'py> {
            /// Returns the proof that this thread is attached to the interpreter.
            #[allow(dead_code, reason = "some readers need no interpreter")]
            pub(crate) fn py(self) -> Python<'py> {
                self.0.py()
            }
        })*
    };
}

arguments! {
    /// A `CacheDesc`.
    DescArg;
    /// An integer.
    IntArg;
    /// A member of `LLMRole`.
    RoleArg;
    /// A text.
    TextArg;
    /// A bool, or `None`.
    FlagArg;
    /// A list of addresses, one for each tensor.
    AddressesArg;
}

impl DescArg<'_, '_> {
    const NAME: &'static str = "cache_desc";

    /// It must be a `CacheDesc`. `None` passes, and fails where it is read.
    pub(crate) fn typed(self) -> PyResult<()> {
        convert::typed(Self::NAME, &self.0, &PythonTypes::get(self.py())?.cache_desc, "CacheDesc")
    }

    /// It must have at least one tensor, in memory of the device.
    pub(crate) fn allocatable(self) -> PyResult<()> {
        convert::not_none(Self::NAME, &self.0)?;
        if convert::num_tensors(&self.0)? == 0 {
            return Err(invalid(self.py(), "num_tensors", 0, "at least 1"));
        }
        on_device(Self::NAME, &self.0)
    }

    /// Returns the description of a cache of this kind and with these keys. Keys of a continuous cache name
    /// its slots.
    pub(crate) fn read(self, kind: CacheKind, keys: &[Option<CacheKey>]) -> PyResult<CacheDesc> {
        convert::not_none(Self::NAME, &self.0)?;
        if kind == CacheKind::Batch && !keys.is_empty() {
            slot_dim(&self.0)?;
        }
        convert::desc(&self.0)
    }
}

impl IntArg<'_, '_> {
    /// An integer of this width.
    pub(crate) fn int<T: Width>(self, name: &str) -> PyResult<T> {
        convert::int(name, &self.0)
    }

    /// An integer of this width, or `None`.
    pub(crate) fn optional<T: Width>(self, name: &str) -> PyResult<Option<T>> {
        convert::optional_int(name, &self.0)
    }
}

impl RoleArg<'_, '_> {
    /// The role; it must be a member of `LLMRole`.
    pub(crate) fn role(self) -> PyResult<Role> {
        let role = PythonTypes::get(self.py())?.role(&self.0);
        role.ok_or_else(|| invalid(self.py(), "role", shown(&self.0), "a member of LLMRole"))
    }
}

impl TextArg<'_, '_> {
    /// It must be a `str`. `None` passes.
    pub(crate) fn typed(self, name: &str) -> PyResult<()> {
        if self.0.is_none() { Ok(()) } else { convert::str_object(name, &self.0).map(drop) }
    }

    /// The text; it must be a `str`.
    pub(crate) fn text(self, name: &str) -> PyResult<String> {
        convert::text(name, &self.0)
    }
}

impl FlagArg<'_, '_> {
    /// A `bool`, or `None`.
    pub(crate) fn optional(self, name: &str) -> PyResult<Option<bool>> {
        if self.0.is_none() {
            return Ok(None);
        }
        self.required(name).map(Some)
    }

    /// A `bool`.
    pub(crate) fn required(self, name: &str) -> PyResult<bool> {
        let flag = self.0.cast::<PyBool>().map_err(|_| only_support(name, "['bool']", &self.0))?;
        Ok(flag.is_true())
    }
}

impl AddressesArg<'_, '_> {
    /// The addresses. A tuple is refused (contract §4.3, §7.6).
    pub(crate) fn addresses(self, name: &str) -> PyResult<Vec<u64>> {
        self.0.cast::<PyList>().map_err(|_| only_support(name, "['list']", &self.0))?;
        convert::numbers(name, &self.0)
    }
}

/// Checks that a `CacheDesc` whose slots get keys counts them in dimension 0.
pub(crate) fn slot_dim(desc: &Any<'_>) -> PyResult<()> {
    let index = any_int("batch_dim_index", &desc.getattr(intern!(desc.py(), "_batch_dim_index"))?)?;
    if index == 0 {
        Ok(())
    } else {
        Err(invalid(desc.py(), "batch_dim_index", index, "0 where slots are named"))
    }
}

/// Checks that a `CacheDesc` is in memory of the device.
pub(crate) fn on_device(name: &str, desc: &Any<'_>) -> PyResult<()> {
    let placement = convert::placement(&desc.getattr(intern!(desc.py(), "_placement"))?)?;
    validate::on_device(name, placement).map_err(|error| raise(desc.py(), &error))
}
