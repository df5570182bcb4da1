//! An argument with a default that is not `None`.

use pyo3::prelude::*;

use crate::convert::Any;

/// An argument that may be missing. `None` is a value like any other.
#[derive(Clone, Copy)]
pub(crate) enum OptionalArg<'a, 'py> {
    /// The caller did not give it.
    Missing,
    /// The caller gave this.
    Given(Borrowed<'a, 'py, PyAny>),
}

impl<'a, 'py> FromPyObject<'a, 'py> for OptionalArg<'a, 'py> {
    type Error = std::convert::Infallible;

    fn extract(given: Borrowed<'a, 'py, PyAny>) -> Result<Self, Self::Error> {
        Ok(OptionalArg::Given(given))
    }
}

impl<'py> OptionalArg<'_, 'py> {
    /// Returns what the caller gave, which may be `None` of Python.
    pub(crate) fn given(self) -> Option<Any<'py>> {
        match self {
            OptionalArg::Missing => None,
            OptionalArg::Given(given) => Some(given.to_owned()),
        }
    }
}
