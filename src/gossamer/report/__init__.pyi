from .figures import plot_bars as plot_bars
from .figures import plot_curves as plot_curves
from .figures import plot_heatmap as plot_heatmap
from .page import write_comparison as write_comparison
from .page import write_page as write_page
from .page import write_scoreboard as write_scoreboard
from .tables import read_table as read_table
from .tables import write_table as write_table
