from django.db import migrations

from echomq_app.models import sql


class Migration(migrations.Migration):
    dependencies = [("echomq", "0001_initial")]

    operations = [
        migrations.RunPython(
            sql.migrate_forwards, sql.migrate_backwards, hints={"model_name": "record"}
        )
    ]
