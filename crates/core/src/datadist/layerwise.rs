//! Stand-in until the layer-wise transfer of the engine is merged.

use std::sync::Arc;
use std::time::Duration;

use super::{DataDist, End};
use crate::check::{self, Destination, LayerwiseArgs};
use crate::error::{Error, ErrorKind, Result};
use crate::id::ClusterId;
use crate::lanes::Lanes;
use crate::task::{Carrier, Task};

struct Nobody(ClusterId);

impl Carrier for Nobody {
    fn find(&self) -> Result<()> {
        if self.0.0 >= 100 {
            return Ok(());
        }
        Err(Error::new(ErrorKind::NotLinked, "no link").with("cluster", self.0))
    }

    fn layer(&self, layer: u32) -> Result<u64> {
        if self.0.0 == 101 {
            return Err(Error::new(ErrorKind::CacheNotFound, format!("no cache for layer {layer}")));
        }
        Ok(1)
    }
}

impl DataDist {
    /// Stand-in.
    #[expect(clippy::needless_pass_by_value, reason = "stand-in")]
    pub fn transfer_async(
        &self,
        from: &End,
        args: LayerwiseArgs,
        to: Vec<Destination>,
        patience: Option<Duration>,
    ) -> Result<Arc<Task>> {
        let near = self.resolve(from)?;
        check::layerwise(near.side(), &args)?;
        let mut carriers: Vec<(_, Arc<dyn Carrier>)> = Vec::new();
        for to in &to {
            check::destination(near.side(), &args, to)?;
            carriers.push((to.src_layers, Arc::new(Nobody(to.cluster))));
        }
        static LANES: std::sync::OnceLock<Arc<Lanes>> = std::sync::OnceLock::new();
        Task::start(LANES.get_or_init(|| Arc::new(Lanes::default())).clone(), carriers, patience)
    }
}
